// The header, and what runs now: all from GET /warmline/status.

import { byId, describe, keep, make, setAttribute, setText } from "./dom.js";
import { age, bytes, count, many, share, short } from "./format.js";

const PHASES = {
  arriving: "arriving",
  loading: "waiting for its model",
  waiting: "waiting for its turn",
  restoring: "restoring from disk",
  prefilling: "prefilling",
  answering: "answering",
  ending: "ending",
  settling: "saving",
};

/** What counts against the disk budget. */
export function bytesUsed(totals) {
  const parts = ["segments", "checkpoints", "quarantined", "writing", "doomed", "index"];
  return parts.reduce((sum, part) => sum + totals[`bytes_${part}`], 0);
}

export function showStatus(status) {
  const { word, text, why } = stateOf(status);
  const state = byId("state");
  setAttribute(state, "data-state", word);
  setText(state, text);
  setText(byId("model"), status.engine?.model ?? "");
  setText(byId("why"), why);
  byId("why").hidden = !why;
  describe(byId("facts"), facts(status));
  showMeters(status);
  showLive(status);
}

/** What was last told may not be so any more. */
export function showUnknown() {
  setAttribute(byId("state"), "data-state", "unknown");
  setText(byId("state"), "Not known");
}

/** Why nothing outlasts the backend; "" where it does. */
function whyUnsaved({ engine, persistence }) {
  if (persistence !== "ok") return persistence;
  const layout = engine?.layout;
  return layout && !layout.persistent ? layout.why_not : "";
}

function stateOf(status) {
  const { engine, backend } = status;
  const cause = whyUnsaved(status);
  const unsaved = cause && `What is computed can't be saved: ${cause}.`;
  if (status.loading) return { word: "loading", text: "Loading the model", why: "" };
  if (backend) return { word: "down", text: "Backend down", why: sentence(backend) };
  if (!engine) return { word: "down", text: "Backend unknown", why: "" };
  if (engine.failure) return { word: "down", text: "Failed", why: sentence(engine.failure) };
  return { word: unsaved ? "warning" : "ready", text: unsaved ? "Ready, not saving" : "Ready", why: unsaved };
}

function sentence(text) {
  const whole = /[.!?]$/.test(text) ? text : `${text}.`;
  return whole.charAt(0).toUpperCase() + whole.slice(1);
}

function facts(status) {
  const { engine, uptime_s, totals, connections, backend_kills } = status;
  const unsaved = status.reuse === "off" ? "nothing is reused, as the settings want it" : whyUnsaved(status);
  const prefill = engine?.prefill_rates?.length ? engine.prefill_rates.at(-1).tokens_per_s : 0;
  const rate = (number) => (number > 0 ? `${short(Math.round(number))} tokens/s` : "–");
  const pairs = [
    ["persistence", unsaved ? "off" : "on", unsaved],
    ["prefill", rate(prefill), "the last measured speed, at the longest context"],
    ["decode", rate(engine?.decode_tokens_per_s ?? 0)],
    ["stored", `${short(totals.tokens)} tokens`, `${count(totals.tokens)} tokens`],
    ["connections", count(connections)],
    ["up", age(uptime_s)],
  ];
  if (backend_kills) pairs.push(["backend restarts", count(backend_kills), "it hung, and was ended"]);
  return pairs;
}

function showMeters({ engine, residents, totals, disk_budget_bytes }) {
  const used = bytesUsed(totals);
  const held = engine ? engine.resident_bytes + engine.running_bytes : 0;
  const meters = [
    ["Memory", held, engine?.memory_budget_bytes ?? 0, many(residents.length, "resident")],
    ["Disk", used, disk_budget_bytes, `${many(totals.segments, "segment")}`],
  ];
  keep(byId("meters"), meters, ([name]) => name, createMeter, updateMeter);
}

function createMeter([name]) {
  const bar = make("div", "bar", make("i"));
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", name);
  bar.setAttribute("aria-valuemin", "0");
  return make("div", "meter", make("b", "", name), bar, make("span", "amount"), make("span", "more"));
}

function updateMeter(element, [, value, most, more]) {
  const [, bar, amount, extra] = element.children;
  const text = most ? `${bytes(value)} of ${bytes(most)}` : bytes(value);
  setAttribute(bar, "aria-valuemax", Math.max(most, value, 1));
  setAttribute(bar, "aria-valuenow", value);
  setAttribute(bar, "aria-valuetext", most ? `${text}, ${share(value, most)}` : text);
  bar.firstChild.style.width = `${most ? Math.min(100, (100 * value) / most) : 0}%`;
  setText(amount, text);
  setText(extra, more);
}

function showLive({ live, running, queued, settling }) {
  setText(byId("live-count"), live.length ? `${running} computing, ${queued} queued, ${settling} saving` : "");
  keep(byId("live"), live.length ? live : [null], (each) => each?.id ?? "none", createLive, updateLive);
}

function createLive(request) {
  if (!request) return make("li", "none", "Nothing is running.");
  const bar = make("div", "bar", make("i"), make("i")); // reused, computed
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", "prompt tokens with rows");
  bar.setAttribute("aria-valuemin", "0");
  return make("li", "", make("span", "who"), make("span", "phase"), bar, make("span", "amount"));
}

function phaseOf({ phase, source }) {
  if (phase === "waiting" && source === "shared") return "waiting for another's prefill";
  return PHASES[phase] ?? phase;
}

function updateLive(element, request) {
  if (!request) return;
  const [who, phase, bar, amount] = element.children;
  const name = request.title || request.client_session || request.client_model || request.endpoint;
  setText(who, name);
  setAttribute(who, "title", `${request.id} ${request.client_model} ${request.client_session}`);
  setText(phase, `${phaseOf(request)}, ${age(request.age_s)}`);
  bar.hidden = request.choices > 0; // each has its own
  setAttribute(bar, "aria-valuemax", Math.max(1, request.prompt_tokens));
  setAttribute(bar, "aria-valuenow", request.prefilled_tokens);
  const warm = Math.min(request.reused_tokens, request.prefilled_tokens);
  const part = (tokens) => `${request.prompt_tokens ? Math.min(100, (100 * tokens) / request.prompt_tokens) : 0}%`;
  bar.firstChild.style.width = part(warm);
  bar.lastChild.style.width = part(request.prefilled_tokens - warm);
  const reused = request.reused_tokens ? `, ${short(request.reused_tokens)} ${request.source}` : "";
  const progress = `${short(request.prefilled_tokens)} of ${short(request.prompt_tokens)} tokens`;
  const choices = request.choices ? many(request.choices, "choice") : "";
  const spoken = request.spoken ? `${short(request.prompt_tokens)} tokens${reused} · ${short(request.spoken)} answered` : "";
  setText(amount, spoken || (request.prompt_tokens ? progress + reused : choices));
}
