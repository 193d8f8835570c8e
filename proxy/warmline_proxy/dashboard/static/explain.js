// Where a request left what is stored, and why: GET /warmline/explain, laid out in place.

import { Refused, get, isAnswer } from "./api.js";
import { button, describe, make } from "./dom.js";
import { count, many, seconds, visible } from "./format.js";

const LONG_S = 0.05; // parts of a time that are told

/** Fills `panel`; `showPath` is called to show where the request landed. */
export async function explain(panel, request, showPath) {
  const why = make("div", "verdict", make("p", "note", "Asking why…"));
  panel.replaceChildren(why);
  await explainAgain(panel, request);
  if (panel.hidden || why.parentElement !== panel) return; // closed meanwhile
  panel.append(numbers(request));
  if (request.session) panel.append(button("Show where it landed", "quiet", showPath));
}

/**
 * Of a panel that was filled: what is stored may have changed since, or been purged.  Throws Unreachable and Unreadable
 * where it has an explanation.
 */
export async function explainAgain(panel, request) {
  const why = panel.firstChild;
  const { parts, said } = await reasons(request, Boolean(why.said));
  if (why.said === said) return; // left as it is, with what is selected in it
  why.said = said;
  why.replaceChildren(...parts);
}

/** What is to be shown, and as a text, to compare by. */
async function reasons(request, again) {
  try {
    const reply = await get("explain", { request: request.id });
    return { parts: verdicts(reply), said: JSON.stringify(reply) };
  } catch (error) {
    if (!isAnswer(error) || (again && !(error instanceof Refused))) throw error;
    const reason = request.error || request.why_not_warmer || "Nothing was left to reuse.";
    const note = `No more is known of it: ${error.message}`;
    return { parts: [make("p", "cause", reason), make("p", "note", note)], said: note };
  }
}

function verdicts({ request, verdict, besides, where, known, prompt, now, waits }) {
  const parts = [verdict, ...besides].flatMap(told);
  for (const wait of waits) parts.push(make("p", "note", `It waited ${seconds(wait.seconds)} for ${wait.means}.`));
  if (request.ttft_s && request.expected_ttft_s) parts.push(make("p", "note", timesOf(request)));
  if (where) parts.push(make("p", "note", `${placeOf(where)}.  ${fateOf(now)}`));
  if (known?.text || prompt?.text) {
    parts.push(make("div", "sides", side("What was known", known), side("What came instead", prompt)));
  }
  return parts;
}

/** The time to the first token beside the expected one, with the parts that matter in either. */
function timesOf({ ttft_s, expected_ttft_s, ttft_parts, expected_parts }) {
  const long = Object.keys(ttft_parts).filter((part) => Math.max(ttft_parts[part], expected_parts[part]) >= LONG_S);
  const parts = long.map((part) => {
    const name = part.replace(/_s$/, "").replace("_", " ");
    return `${name} ${seconds(ttft_parts[part])}, expected ${seconds(expected_parts[part])}`;
  });
  const all = `First token after ${seconds(ttft_s)}, expected after ${seconds(expected_ttft_s)}`;
  return `${[all, ...parts].join("; ")}.`;
}

function told({ cause, means, detail, advice }) {
  const words = [make("b", "", cause), " ", means, detail ? ` ${detail}` : ""];
  const parts = [make("p", "cause", ...words)];
  return advice ? [...parts, make("p", "advice", ...worded(advice))] : parts;
}

/** What stands between backticks is set as code. */
function worded(text) {
  return text.split("`").map((part, place) => (place % 2 ? make("code", "", part) : part));
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
  const cut = (from, until) => visible(characters.slice(from, until).join(""));
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
  if (request.decode_passes) {
    more.push(["tokens a step", (request.generated_tokens / request.decode_passes).toFixed(2)]);
    more.push(["drafted", `${count(request.drafted_tokens)} tokens, ${count(request.accepted_tokens)} right`]);
    const sources = Object.entries(request.accepted_by_source);
    if (sources.length) more.push(["right by", sources.map(([source, right]) => `${source}: ${count(right)}`).join(", ")]);
    if (request.no_drafts) more.push(["no drafts", request.no_drafts]);
  }
  if (request.key) more.push(["client key", request.key]);
  if (request.dispatches > 1) more.push(["sent to a backend", `${count(request.dispatches)} times`]);
  if (request.audit) more.push(["audit", request.audit]);
  if (request.guard) more.push(["guard", request.guard]);
  describe(list, [...tokens, ...spans, ...more]);
  return list;
}
