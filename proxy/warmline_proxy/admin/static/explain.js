// Where a request left what is stored, and why: GET /warmline/explain, laid out in place.

import { Refused, Unreachable, get } from "./api.js";
import { button, describe, make } from "./dom.js";
import { count, many, seconds } from "./format.js";

/** Fills `panel`; `showPath` is called to show where the request landed. */
export async function explain(panel, request, showPath) {
  panel.replaceChildren(make("p", "note", "Asking why…"));
  const parts = [numbers(request)];
  try {
    parts.unshift(...verdicts(await get("explain", { request: request.id })));
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    const reason = request.error || request.why_not_warmer || "Nothing was left to reuse.";
    parts.unshift(make("p", "cause", reason), make("p", "note", `No more is known of it: ${error.message}`));
  }
  if (request.session) parts.push(button("Show where it landed", "quiet", showPath));
  if (!panel.hidden) panel.replaceChildren(...parts);
}

function verdicts({ verdict, besides, where, known, prompt, now }) {
  const parts = [verdict, ...besides].flatMap(told);
  if (where) parts.push(make("p", "note", `${placeOf(where)}.  ${fateOf(now)}`));
  if (known?.text || prompt?.text) {
    parts.push(make("div", "sides", side("What was known", known), side("What came instead", prompt)));
  }
  return parts;
}

function told({ cause, means, detail, advice }) {
  const words = [make("b", "", cause), " ", means, detail ? ` ${detail}` : ""];
  const parts = [make("p", "cause", ...words)];
  return advice ? [...parts, make("p", "advice", advice)] : parts;
}

function placeOf({ token, message, message_last, role }) {
  const at = `It differs at token ${count(token)}`;
  if (role === "tools") return `${at}, in the tools`;
  if (!message) return at;
  const which = message_last > message ? `messages ${message} to ${message_last}` : `message ${message}`;
  return `${at}, in ${which}${role ? ` (${role})` : ""}`;
}

function fateOf({ tokens, branch }) {
  const own = tokens ? many(tokens, "token") : "Nothing";
  return `${own} of this prompt ${tokens > 1 ? "are" : "is"} stored now; what it differed from ${branch ? "still is, too" : "is not stored any more"}.`;
}

/** A window of a text with what differs marked. */
function side(title, { text, differs }) {
  const characters = [...text]; // ranges count these, not UTF-16's units
  const cut = (from, until) => characters.slice(from, until).join("");
  const words = make("pre");
  let at = 0;
  for (const [from, until] of differs) {
    words.append(cut(at, from), make("mark", "", cut(from, until)));
    at = until;
  }
  words.append(cut(at) || (text ? "" : "(its text is not known)"));
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
