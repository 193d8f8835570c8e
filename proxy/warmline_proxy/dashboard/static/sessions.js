// The table of conversations: a page at a time, searched and sorted by the proxy; purged and pinned from here.

import { get, post, tried } from "./api.js";
import { confirm } from "./dialog.js";
import { byId, button, keep, make, say, setAttribute, setText } from "./dom.js";
import { ago, bytes, clock, count, many, nameOf, short } from "./format.js";

const PAGE = 12;
const NAMED_MAX = 6; // conversations that the question before a purge names
const SEARCH_REST_MS = 200;
const COLUMNS = [
  { name: "title", title: "Conversation" },
  { name: "tokens", title: "Tokens", first: "-" },
  { name: "bytes", title: "On disk", first: "-" },
  { name: "bytes_alone", title: "Alone", first: "-", hint: "on disk for it alone: no other conversation shares it" },
  { name: "requests", title: "Requests", first: "-" },
  { name: "last_used", title: "Last used", first: "-" },
];
const view = { offset: 0, sort: "-last_used", wanted: "", now: 0, asking: false, changed: () => {}, showPath: () => {} };

/** `changed()` is called when something was purged or pinned; `showPath(session)` shows a conversation in the tree. */
export function startSessions(changed, showPath) {
  Object.assign(view, { changed, showPath });
  const actions = make("th", "", make("span", "spoken", "Actions"));
  byId("columns").append(...COLUMNS.map(createHead), actions);
  for (const head of byId("columns").children) head.setAttribute("role", "columnheader");
  byId("search").addEventListener("input", () => {
    clearTimeout(view.rest);
    view.rest = setTimeout(() => seek({ wanted: byId("search").value, offset: 0 }), SEARCH_REST_MS);
  });
  byId("sessions-back").addEventListener("click", () => seek({ offset: Math.max(0, view.offset - PAGE) }));
  byId("sessions-on").addEventListener("click", () => seek({ offset: view.offset + PAGE }));
}

export async function refreshSessions(now) {
  view.now = now;
  const { offset, sort, wanted } = view;
  const reply = await get("sessions", { offset, count: PAGE, sort, q: wanted });
  if (offset !== view.offset || sort !== view.sort || wanted !== view.wanted) return; // asked for something else since
  if (reply.matching && offset >= reply.matching) return seek({ offset: 0 });
  show(reply);
}

const seek = tried(async (change) => {
  Object.assign(view, change);
  await refreshSessions(view.now);
});

function show({ sessions, matching, total, offset }) {
  setText(byId("sessions-count"), view.wanted ? `${count(matching)} of ${count(total)}` : count(total));
  keep(byId("session-rows"), sessions, (each) => each.id, createRow, updateRow);
  const none = byId("sessions-none");
  none.hidden = sessions.length > 0;
  setText(none, view.wanted ? `Nothing is called like “${view.wanted}”.` : "None is stored.");
  byId("sessions-back").disabled = offset === 0;
  byId("sessions-on").disabled = offset + sessions.length >= matching;
  for (const head of byId("columns").children) {
    const { column } = head.dataset;
    const direction = { [column]: "ascending", [`-${column}`]: "descending" }[view.sort];
    setAttribute(head, "aria-sort", direction ?? (column ? "none" : null));
  }
}

function createHead({ name, title, hint, first = "" }) {
  const turn = () => seek({ sort: turned(name, first), offset: 0 });
  const head = make("th", "", button(title, "sort", turn));
  head.scope = "col";
  if (hint) head.title = hint;
  head.dataset.column = name;
  return head;
}

/** The other way round where it is sorted by this already. */
function turned(name, first) {
  const other = first ? "" : "-";
  return view.sort === first + name ? other + name : first + name;
}

function createRow(session) {
  const cells = COLUMNS.map(({ title }) => {
    const cell = make("td");
    cell.dataset.title = title;
    return cell;
  });
  cells[0].append(make("b"), make("span", "id"));
  const pin = button("Pin", "quiet pin", () => setPinned(session.id, pin));
  const tree = button("Tree", "quiet", () => view.showPath(session.id));
  const gone = button("Purge…", "quiet danger", () => purge(session.id, row));
  const row = make("tr", "", ...cells, make("td", "actions", pin, tree, gone));
  row.setAttribute("role", "row");
  for (const cell of row.children) cell.setAttribute("role", "cell");
  return row;
}

function updateRow(row, session) {
  const [name, tokens, size, alone, requests, used, actions] = row.children;
  const title = nameOf(session);
  setText(name.firstChild, title);
  name.firstChild.classList.toggle("unnamed", !(session.title || session.client));
  setText(name.lastChild, [session.id, session.key, session.model].filter(Boolean).join(" · "));
  setAttribute(name, "title", [title, session.key, session.model].filter(Boolean).join(" · "));
  setText(tokens, short(session.tokens));
  setText(size, bytes(session.bytes));
  setText(alone, bytes(session.bytes_alone));
  setText(requests, count(session.requests));
  setText(used, ago(session.last_used, view.now));
  setAttribute(used, "title", clock(session.last_used));
  const [pin, tree, gone] = actions.children;
  const partly = session.pinned && !session.pinned_all;
  setText(pin, session.pinned ? (partly ? "Pinned in part" : "Pinned") : "Pin");
  setAttribute(pin, "aria-pressed", partly ? "mixed" : session.pinned);
  setAttribute(pin, "aria-label", `Pin ${title} ${session.id}`);
  setAttribute(tree, "aria-label", `Show ${title} ${session.id} in the tree`);
  setAttribute(gone, "aria-label", `Purge ${title} ${session.id}`);
}

async function setPinned(session, pin) {
  const off = pin.getAttribute("aria-pressed") === "true";
  try {
    const reply = await post("pin", { session, off });
    const amounts = `${bytes(reply.bytes_pinned)} of at most ${bytes(reply.bytes_pinned_max)} are pinned`;
    say(`${session} is ${reply.pinned ? "pinned: it is not evicted" : "no longer pinned"}; ${amounts}.`);
    view.changed();
  } catch (error) {
    say(`Not ${off ? "unpinned" : "pinned"}: ${error.message}`);
  }
}

/** One question at a time: none takes another's place under somebody's finger. */
async function purge(session, row) {
  if (view.asking) return;
  view.asking = true;
  const { textContent, classList } = row.firstChild.firstChild;
  const name = classList.contains("unnamed") ? `the conversation ${textContent}` : `“${textContent}”`;
  try {
    const would = await post("purge", { session, dry_run: true });
    if (!would.sessions.length) return isGone(session);
    const doing = would.bytes_freed ? `Purge ${bytes(would.bytes_freed)}` : "Purge";
    if (!(await confirm(`Purge ${name}?`, question(session, would), doing))) return;
    const did = await post("purge", { session });
    if (!did.sessions.length) return isGone(session);
    const left = did.cuts.filter((cut) => cut.why_not);
    const stays = left.map((cut) => ` ${bytes(cut.bytes_count)} of segment ${cut.segment} stay: ${cut.why_not}.`).join("");
    say(`Purged ${many(did.sessions.length, "conversation")}, ${bytes(did.bytes_freed)}.${stays}`);
    view.changed();
    byId("search").focus(); // the button that was pressed is gone
  } catch (error) {
    say(`Not purged: ${error.message}`);
  } finally {
    view.asking = false;
  }
}

function isGone(session) {
  say(`Conversation ${session} is not stored any more.`);
  view.changed();
}

function question(session, { sessions, segments, checkpoints, cuts, bytes_freed }) {
  const others = sessions.filter((each) => each !== session);
  const files = [many(segments.length, "segment")];
  if (cuts.length) files.push(`a part of ${count(cuts.length)} more`);
  if (checkpoints.length) files.push(many(checkpoints.length, "checkpoint"));
  const listed = [files.slice(0, -1).join(", "), files.at(-1)].filter(Boolean).join(" and ");
  const freed = bytes_freed ? `${listed}, ${bytes(bytes_freed)}` : "its name only, as others begin with all of it";
  const parts = [make("p", "", `Conversation ${session} goes: ${freed}. It can't be undone.`)];
  if (others.length) {
    const named = others.slice(0, NAMED_MAX).join(", ") + (others.length > NAMED_MAX ? " and more" : "");
    parts.push(make("p", "", `With it ${many(others.length, "conversation")} that it carried: ${named}.`));
  }
  const shared = "What another conversation begins with as well stays.";
  parts.push(make("p", "note", `${shared} Memory is emptied; others come back from disk.`));
  return parts;
}
