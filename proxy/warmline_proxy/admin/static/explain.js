// Where a request left what is stored, and why: GET /warmline/explain, laid out in place.

import { get } from "./api.js";
import { button, describe, make } from "./dom.js";
import { count, seconds } from "./format.js";

/** Fills `panel`; `showPath` is called to show where the request landed. */
export async function explain(panel, request, showPath) {
  panel.replaceChildren(make("p", "note", "Asking why…"));
  const parts = [numbers(request)];
  try {
    parts.unshift(...verdict(await get("explain", { request: request.id })));
  } catch (error) {
    const reason = request.error || request.why_not_warmer || "Nothing was left to reuse.";
    parts.unshift(make("p", "cause", reason), make("p", "note", `No more is known of it: ${error.message}`));
  }
  if (request.session) parts.push(button("Show where it landed", "quiet", showPath));
  if (!panel.hidden) panel.replaceChildren(...parts);
}

function verdict({ cause, sentence, advice, where, stored, prompt, now }) {
  const parts = [make("p", "cause", make("b", "", cause), " ", sentence)];
  if (advice) parts.push(make("p", "advice", advice));
  if (where) parts.push(make("p", "note", where));
  if (stored.text || prompt.text) {
    parts.push(make("div", "sides", side("What is stored", stored), side("What was sent", prompt)));
  }
  if (now) parts.push(make("p", "note", now));
  return parts;
}

/** A text with the part that differs marked, and its ends shown as the middle of something longer. */
function side(title, { text, from, until }) {
  const [before, differs, after] = [text.slice(0, from), text.slice(from, until), text.slice(until)];
  const words = make("pre", "", before, make("mark", differs ? "" : "nothing", differs || "(nothing)"), after);
  words.tabIndex = 0;
  words.setAttribute("aria-label", title);
  return make("div", "side", make("h3", "", title), words);
}

function numbers(request) {
  const list = make("dl", "facts");
  const tokens = [
    ["request", request.id],
    ["conversation", request.session || "–"],
    ["prompt", `${count(request.prompt_tokens)} tokens`],
    ["reused", `${count(request.cached_tokens)} tokens`],
    ["prefilled", `${count(request.prefilled_tokens)} tokens`],
    ["generated", `${count(request.generated_tokens)} tokens`],
    ["saved to disk", `${count(request.saved_tokens)} tokens`],
  ];
  const times = ["queue", "restore", "prefill", "ttft", "decode", "total"];
  const spans = times.map((part) => [part === "ttft" ? "first token" : part, seconds(request[`${part}_s`])]);
  const more = [];
  if (request.key) more.push(["client key", request.key]);
  if (request.dispatches > 1) more.push(["sent to a backend", `${count(request.dispatches)} times`]);
  if (request.audit) more.push(["audit", request.audit]);
  if (request.guard) more.push(["guard", request.guard]);
  describe(list, [...tokens, ...spans, ...more]);
  return list;
}
