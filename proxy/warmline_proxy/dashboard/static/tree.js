// The conversation tree: loaded as it is opened, moved in with arrow keys, a path through it marked on demand.

import { Refused, get, tried } from "./api.js";
import { byId, keep, make, say, setAttribute, setText } from "./dom.js";
import { ago, bytes, count, many, nameOf, share, short } from "./format.js";

const PAGE = 30;
const PAGE_MAX = 200; // of the proxy
const ROOT = "";
const NOT_NAMES = ["no key", "shared", "shared by all keys", "a removed key"]; // whose a cache may be besides a key's
const view = {
  branches: new Map(), // by parent's id: { nodes, total }
  open: new Set(), // ids of nodes whose branch is shown
  active: "", // id of the item that Tab leads to
  marked: null, // what the path was asked for: { session, reused }
  path: new Map(), // ids on the marked path, with what to say there
  bytes: 1,
  now: 0,
};

export function startTree() {
  byId("tree").addEventListener("keydown", tried(onKey));
  byId("tree").addEventListener("click", tried(onClick));
  byId("tree-clear").addEventListener("click", () => {
    unmark();
    draw();
    byId("tree").querySelector('[tabindex="0"]')?.focus();
  });
}

/** Asks again for every branch that is shown. */
export async function refreshTree(totals) {
  view.now = Date.now() / 1000;
  setText(byId("tree-count"), totals.segments ? many(totals.segments, "segment") : "");
  if (view.marked) await refreshPath(view.marked);
  const wasEmpty = !view.branches.get(ROOT)?.nodes.length;
  for (const parent of [ROOT, ...view.open]) await reload(parent);
  const nodes = view.branches.get(ROOT)?.nodes ?? [];
  if (wasEmpty && nodes.length === 1) await open(nodes[0].id); // there is nothing to choose from
  draw();
}

/** The path where it leads now, or none where its conversation is gone. */
async function refreshPath(marked) {
  const found = await known(get("path", { session: marked.session }));
  if (marked !== view.marked) return; // another was marked meanwhile
  if (!found) return unmark();
  found.nodes.forEach((node, place) => lay(place ? found.nodes[place - 1].id : ROOT, node));
  view.path = notes(found.nodes, found.tokens, marked.reused);
}

/** Shows a node that was met on a path, where its branch is shown: it may be further down than that is. */
function lay(parent, node) {
  const branch = view.branches.get(parent);
  if (!branch) return;
  const place = branch.nodes.findIndex((each) => each.id === node.id);
  const nodes = place < 0 ? [...branch.nodes, node] : branch.nodes.with(place, node);
  view.branches.set(parent, { ...branch, nodes });
}

async function reload(parent) {
  const before = view.branches.get(parent);
  const found = await known(firstOf(parent, Math.max(PAGE, before?.nodes.length ?? 0)));
  if (before !== view.branches.get(parent)) return; // more was loaded meanwhile
  if (found) {
    const onPath = (before?.nodes ?? []).filter((node) => view.path.has(node.id));
    view.branches.set(parent, { nodes: merged(found.nodes, onPath), total: found.total });
  } else {
    view.branches.delete(parent);
    view.open.delete(parent);
  }
}

/** An answer, or null where what was asked for is not stored any more. */
async function known(asked) {
  try {
    return await asked;
  } catch (error) {
    if (error instanceof Refused && error.status === 404) return null;
    throw error;
  }
}

/** A branch's first nodes, so many of them or all. */
async function firstOf(parent, wanted) {
  const nodes = [];
  for (;;) {
    const count = Math.min(PAGE_MAX, wanted - nodes.length);
    const reply = await get("tree", { parent, offset: nodes.length, count });
    nodes.push(...reply.nodes);
    if (!reply.nodes.length || nodes.length >= Math.min(wanted, reply.total)) return { nodes, total: reply.total };
  }
}

/** The first, and of the second what is not among them. */
function merged(nodes, more) {
  const known = new Set(nodes.map((node) => node.id));
  return [...nodes, ...more.filter((node) => !known.has(node.id))];
}

async function loadMore(parent) {
  const branch = view.branches.get(parent);
  const offset = branch.nodes.findIndex((node, place) => node.place !== place);
  const reply = await get("tree", { parent, offset: offset < 0 ? branch.nodes.length : offset, count: PAGE });
  const inOrder = offset < 0 ? branch.nodes : branch.nodes.slice(0, offset);
  const added = merged(inOrder, reply.nodes);
  view.branches.set(parent, { nodes: merged(added, branch.nodes), total: reply.total });
  view.active = added[inOrder.length]?.id ?? view.active;
}

/** Opens the way to where a conversation ends, and marks it; `reused`: tokens that a request started from. */
export async function highlight(session, reused = -1) {
  try {
    const { nodes, tokens } = await get("path", { session });
    for (const [place, node] of nodes.entries()) {
      const parent = place ? nodes[place - 1].id : ROOT;
      if (!view.branches.has(parent)) await reload(parent);
      lay(parent, node);
      if (place < nodes.length - 1) view.open.add(node.id);
    }
    Object.assign(view, { marked: { session, reused }, path: notes(nodes, tokens, reused), active: nodes.at(-1).id });
    byId("tree-clear").hidden = false;
    draw();
    itemOf(view.active)?.focus();
    itemOf(view.active)?.scrollIntoView({ block: "center" });
  } catch (error) {
    say(`Not in the tree: ${error.message}`);
  }
}

function notes(nodes, tokens, reused) {
  const found = new Map(nodes.map((node) => [node.id, ""]));
  found.set(nodes.at(-1).id, `ends at token ${count(tokens)}`);
  const start = reused > 0 && nodes.findLast((node) => node.segments && node.start < reused);
  if (start) {
    const note = `reused up to token ${count(reused)}`;
    found.set(start.id, [note, found.get(start.id)].filter(Boolean).join(", "));
  }
  return found;
}

function unmark() {
  Object.assign(view, { marked: null, path: new Map() });
  byId("tree-clear").hidden = true;
}

// --- drawing ---

function draw() {
  const roots = view.branches.get(ROOT);
  view.bytes = Math.max(1, (roots?.nodes ?? []).reduce((sum, node) => sum + node.bytes_below, 0));
  drawBranch(byId("tree"), ROOT, 1);
  const items = [...byId("tree").querySelectorAll('[role="treeitem"]')];
  if (!items.some((item) => item.dataset.key === view.active)) view.active = items[0]?.dataset.key ?? "";
  for (const item of items) item.tabIndex = item.dataset.key === view.active ? 0 : -1;
  byId("tree-note").hidden = items.length > 0;
}

function drawBranch(list, parent, level) {
  const branch = view.branches.get(parent) ?? { nodes: [], total: 0 };
  const left = branch.total - branch.nodes.length;
  const items = left > 0 ? [...branch.nodes, { id: `more ${parent}`, more: left }] : branch.nodes;
  keep(list, items, (node) => node.id, create, (item, node, place) => {
    setAttribute(item, "aria-level", level);
    setAttribute(item, "aria-posinset", place + 1);
    setAttribute(item, "aria-setsize", items.length);
    if (node.more) setText(item.firstChild, `Show ${count(Math.min(PAGE, node.more))} more of ${count(node.more)}`);
    else update(item, node, level);
  });
}

function create(node) {
  const item = make("li", "", make("div", "node"));
  item.setAttribute("role", "treeitem");
  if (node.more) {
    item.classList.add("more");
    return item;
  }
  item.firstChild.append(
    make("span", "twist"), make("b", "span"), make("span", "size"), make("span", "bar", make("i")),
    make("span", "about"), make("span", "mark"),
  );
  item.append(make("ul"));
  item.lastChild.setAttribute("role", "group");
  item.firstChild.id = `node-${node.id}`;
  item.setAttribute("aria-labelledby", item.firstChild.id);
  return item;
}

function update(item, node, level) {
  const isOpen = view.open.has(node.id);
  setAttribute(item, "aria-expanded", node.children ? isOpen : null);
  const [, span, size, bar, about, note] = item.firstChild.children;
  setText(span, node.segments ? `${count(node.start)}–${count(node.end)}` : node.model || "unnamed model");
  setText(size, bytes(node.bytes_below));
  setAttribute(size, "title", `${share(node.bytes_below, view.bytes)} of all; ${bytes(node.bytes)} of its own`);
  bar.firstChild.style.width = `${(100 * node.bytes_below) / view.bytes}%`;
  setText(about, describe(node));
  setAttribute(about, "title", `last used ${ago(node.last_used, view.now)}`);
  setText(note, view.path.get(node.id) ?? "");
  item.classList.toggle("on-path", view.path.has(node.id));
  item.lastChild.hidden = !isOpen;
  if (isOpen) drawBranch(item.lastChild, node.id, level + 1);
  else item.lastChild.replaceChildren();
}

function describe(node) {
  const parts = [];
  if (!node.segments && node.key) parts.push(NOT_NAMES.includes(node.key) ? node.key : `key ${node.key}`);
  if (!node.segments) parts.push(many(node.sessions_below, "conversation"), many(node.segments_below, "segment"));
  else if (node.children) parts.push(many(node.children, "branch", "branches"));
  if (node.segments > 1) parts.push(many(node.segments, "segment"));
  if (node.sessions_ending) parts.push(`ends: ${names(node)}`);
  if (node.hits) parts.push(many(node.hits, "hit"));
  if (node.checkpoints) parts.push(many(node.checkpoints, "checkpoint"));
  if (node.pinned) parts.push("pinned");
  return parts.join(" · ");
}

function names({ ending, sessions_ending }) {
  const named = ending.map(nameOf).join(", ");
  return sessions_ending > ending.length ? `${named} and ${short(sessions_ending - ending.length)} more` : named;
}

// --- moving ---

const itemOf = (id) => [...byId("tree").querySelectorAll('[role="treeitem"]')].find((item) => item.dataset.key === id);

async function onClick(event) {
  const item = event.target.closest('[role="treeitem"]');
  if (item) await activate(item);
}

async function activate(item) {
  view.active = item.dataset.key;
  if (item.classList.contains("more")) await loadMore(item.parentElement.closest("li")?.dataset.key ?? ROOT);
  else if (item.hasAttribute("aria-expanded")) await setOpen(item, item.getAttribute("aria-expanded") === "false");
  draw();
  itemOf(view.active)?.focus();
}

async function setOpen(item, isOpen) {
  const id = item.dataset.key;
  if (isOpen) await open(id);
  else view.open.delete(id);
}

async function open(id) {
  await reload(id);
  if (view.branches.has(id)) view.open.add(id);
}

const MOVES = {
  ArrowDown: (items, at) => items[at + 1],
  ArrowUp: (items, at) => items[at - 1],
  Home: (items) => items[0],
  End: (items) => items.at(-1),
};

async function onKey(event) {
  const item = event.target.closest('[role="treeitem"]');
  if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
  const items = [...byId("tree").querySelectorAll('[role="treeitem"]')];
  const acts = { ArrowRight: goIn, ArrowLeft: goOut, Enter: activate, " ": activate };
  if (!(event.key in MOVES || event.key in acts)) return;
  event.preventDefault();
  if (event.key in MOVES) moveTo(MOVES[event.key](items, items.indexOf(item)));
  else await acts[event.key](item);
}

function moveTo(item) {
  if (!item) return;
  view.active = item.dataset.key;
  draw();
  item.focus();
}

async function goIn(item) {
  if (item.getAttribute("aria-expanded") === "false") await activate(item);
  else moveTo(item.querySelector('[role="treeitem"]'));
}

async function goOut(item) {
  if (item.getAttribute("aria-expanded") === "true") await activate(item);
  else moveTo(item.parentElement.closest('[role="treeitem"]'));
}
