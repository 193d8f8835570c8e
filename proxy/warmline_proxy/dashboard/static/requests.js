// The timeline: a request a row, its time as a bar, its explanation opened in place.

import { get, tried } from "./api.js";
import { byId, button, keep, make, say, setAttribute, setText } from "./dom.js";
import { explain, explainAgain } from "./explain.js";
import { clock, count, many, nameOf, seconds, short } from "./format.js";

const PAGE = 15;
const PAGE_MAX = 200; // of the proxy
const BLOCK = 64;
const PARTS = ["queue", "restore", "prefill", "decode"];
const SHOWN = [...PARTS, "other"]; // which is what is left of its time, as while it waits for another's prefill
const view = { offset: 0, open: "", shown: [], showPath: () => {} }; // `open`: the key of the row that is explained

/** `showPath(request)` shows in the tree where a request landed. */
export function startRequests(showPath) {
  view.showPath = showPath;
  byId("requests-back").addEventListener("click", () => turn(-PAGE));
  byId("requests-on").addEventListener("click", () => turn(PAGE));
  byId("newer").addEventListener("click", () => {
    close();
    turn(-view.offset);
    byId("requests").focus();
  });
}

export const requestsWanted = () => ({ offset: view.offset, count: PAGE });

/** Clients may name requests, and two alike. */
const keyOf = (request) => `${request.id}-${request.at}`;

/** What came meanwhile waits where somebody reads: rows must not move under a finger. */
export function showRequests(reply) {
  if (reply.offset !== view.offset) return; // asked for before the page was turned
  const { requests, total } = reply;
  if (!requests.length && view.offset) return turn(-view.offset); // there are fewer than there were
  setText(byId("requests-count"), total ? `${count(total)} kept` : "none yet");
  const held = view.open || byId("timeline").contains(document.activeElement);
  const place = held ? requests.findIndex((each) => keyOf(each) === keyOf(view.shown[0])) : 0;
  if (place) tellOfNewer(place);
  else show(requests, total);
}

function tellOfNewer(place) {
  byId("newer").hidden = false;
  setText(byId("newer"), place > 0 ? `Show ${count(place)} newer` : "Show newer ones");
}

function show(requests, total) {
  view.shown = requests;
  byId("newer").hidden = view.offset === 0;
  if (view.offset) setText(byId("newer"), "Show the newest");
  const longest = Math.max(0.001, ...requests.map((each) => sum(spans(each))));
  keep(byId("timeline"), requests, keyOf, createRow, (row, each) => updateRow(row, each, longest));
  byId("requests-back").disabled = view.offset === 0;
  byId("requests-on").disabled = view.offset + requests.length >= total;
}

const turn = tried(async (by) => {
  close();
  view.offset = Math.max(0, view.offset + by);
  showRequests(await get("activity", requestsWanted()));
});

/** Turns to the page that has a request, and explains it there. */
export const openRequest = tried(async (id) => {
  const places = [];
  for (let total = 1; places.length < total; ) {
    const reply = await get("activity", { offset: places.length, count: PAGE_MAX });
    if (!reply.requests.length) break;
    places.push(...reply.requests.map((each) => each.id));
    total = reply.total;
    if (places.includes(id)) break;
  }
  const place = places.indexOf(id);
  if (place < 0) return say(`The request ${id} is not among the last ones.`);
  await turn(PAGE * Math.floor(place / PAGE) - view.offset);
  const request = view.shown.find((each) => each.id === id);
  if (!request) return; // newer ones have moved it to the next page meanwhile
  byId(`request-${keyOf(request)}`).focus();
  await toggle(keyOf(request));
});

/** Seconds of each of SHOWN, which lie one after the other. */
function spans(request) {
  const known = PARTS.map((part) => request[`${part}_s`]);
  return [...known, Math.max(0, request.total_s - sum(known))];
}

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);

function createRow(request) {
  const key = keyOf(request);
  const row = button("", "row", () => toggle(key));
  row.id = `request-${key}`;
  row.setAttribute("aria-expanded", "false");
  const bar = make("span", "bar", ...SHOWN.map((part) => make("i", part)));
  bar.setAttribute("aria-hidden", "true");
  const spoken = make("span", "spoken");
  row.append(
    make("span", "at"), make("span", "who"), make("span", "source"), bar, spoken, make("span", "tokens"),
    make("span", "ttft"), make("span", "reason"),
  );
  const panel = make("div", "panel");
  panel.id = `explanation-${key}`;
  panel.hidden = true;
  row.setAttribute("aria-controls", panel.id);
  return make("li", "", row, panel);
}

function updateRow(item, request, longest) {
  const [at, who, source, bar, spoken, tokens, ttft, reason] = item.firstChild.children;
  setText(at, clock(request.at));
  const name = request.client || request.created ? nameOf(request) : "";
  setText(who, [name, request.client_model || request.endpoint].filter(Boolean).join(" · "));
  setAttribute(who, "title", `${request.endpoint} ${request.client_model} ${request.id}`);
  setText(source, request.outcome === "ok" ? request.source : request.outcome);
  setAttribute(source, "data-start", request.outcome === "ok" ? startOf(request) : request.outcome);
  const times = spans(request);
  times.forEach((time, place) => {
    bar.children[place].style.width = `${(100 * time) / longest}%`;
  });
  setText(spoken, SHOWN.map((part, place) => `${part} ${seconds(times[place])}`).join(", "));
  const reused = `${short(request.cached_tokens)} of ${short(request.prompt_tokens)} reused`;
  setText(tokens, request.prompt_tokens ? reused : "–"); // refused before it had a prompt
  setAttribute(tokens, "title", `${count(request.cached_tokens)} of ${many(request.prompt_tokens, "prompt token")}`);
  setText(ttft, request.ttft_s ? seconds(request.ttft_s) : "–");
  const expected = request.expected_ttft_s ? `; expected ${seconds(request.expected_ttft_s)}` : "";
  setAttribute(ttft, "title", `time to the first token${expected}`);
  setText(reason, request.error || request.why_not_warmer);
}

/** Begun with a few tokens, which many begin with, is as good as cold, wherever they were. */
function startOf({ cached_tokens, prompt_tokens }) {
  return cached_tokens < BLOCK && 2 * cached_tokens < prompt_tokens ? "cold" : "warm";
}

function close() {
  if (view.open) toggle(view.open);
}

async function toggle(key) {
  const opens = view.open !== key;
  const before = view.open;
  view.open = opens ? key : "";
  for (const each of [before, key]) setOpen(each, each === view.open);
  if (!opens) return;
  const request = view.shown.find((each) => keyOf(each) === key);
  await explain(byId(`explanation-${key}`), request, () => view.showPath(request));
}

/** What is stored has changed: of what was purged, no text stays. */
export async function refreshExplanation() {
  const panel = view.open && byId(`explanation-${view.open}`);
  if (panel?.childElementCount) await explainAgain(panel, view.shown.find((each) => keyOf(each) === view.open));
}

function setOpen(key, open) {
  const row = byId(`request-${key}`);
  if (!row) return;
  setAttribute(row, "aria-expanded", open);
  row.nextElementSibling.hidden = !open;
  if (!open) row.nextElementSibling.replaceChildren();
}
