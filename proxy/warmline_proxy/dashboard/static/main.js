// Starts the page and asks for what it shows, every two seconds while somebody can see it.

import { Refused, Unreachable, get, isAnswer } from "./api.js";
import { showHistory } from "./chart.js";
import { enterChat, showChatModels, startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { clock } from "./format.js";
import { showModels } from "./models.js";
import { bytesUsed, showStatus, showUnknown } from "./overview.js";
import { openRequest, refreshExplanation, requestsWanted, showRequests, startRequests } from "./requests.js";
import { refreshSessions, startSessions } from "./sessions.js";
import { highlight, refreshTree, startTree } from "./tree.js";
import { startViews } from "./views.js";

const REST_MS = 2000;
const UNAUTHORIZED = 401;
const STORED_REST_MS = 10_000; // how long what is stored is not asked for again, where its sums don't change
const state = { timer: 0, asking: false, lostAt: 0, stored: "", storedAt: 0 };

async function tick() {
  clearTimeout(state.timer);
  if (state.asking || document.visibilityState !== "visible") return;
  state.asking = true;
  try {
    await ask();
    found();
  } catch (error) {
    lost(error);
  } finally {
    state.asking = false;
    state.timer = setTimeout(tick, REST_MS);
  }
}

async function ask() {
  const [status, activity] = await Promise.all([get("status"), get("activity", requestsWanted())]);
  showStatus(status);
  showModels(status);
  showChatModels(status);
  showHistory(activity.history);
  showRequests(activity);
  byId("empty").hidden = activity.total > 0 || status.totals.sessions > 0 || status.live.length > 0;
  await askForStored(status);
}

async function askForStored({ at, totals }) {
  const { segments, sessions, tokens } = totals;
  const sums = [segments, sessions, tokens, bytesUsed(totals)].join();
  if (sums === state.stored && performance.now() - state.storedAt < STORED_REST_MS) return;
  Object.assign(state, { stored: sums, storedAt: performance.now() }); // first: what `changed` meanwhile is asked again
  try {
    await Promise.all([refreshSessions(at), refreshTree(totals), refreshExplanation()]);
  } catch (error) {
    state.stored = "";
    throw error;
  }
}

function changed() {
  state.stored = "";
  tick();
}

function found() {
  state.lostAt = 0;
  byId("banner").hidden = true;
  document.documentElement.dataset.asked = String(Number(document.documentElement.dataset.asked ?? 0) + 1);
}

/** What is shown stays, and what is wrong stands above it. */
function lost(error) {
  state.lostAt ||= Date.now() / 1000;
  setText(byId("banner"), `${whatIsWrong(error)} (since ${clock(state.lostAt)}; it is asked again every 2 s)`);
  byId("banner").hidden = false;
  showUnknown();
  if (!isAnswer(error)) throw error;
}

function whatIsWrong(error) {
  if (error instanceof Unreachable) return "Proxy unreachable";
  if (!(error instanceof Refused)) return "The proxy's answers can't be read: reload this page";
  const advice = error.status === UNAUTHORIZED ? " Reload this page to be asked for the key." : "";
  return `The proxy refuses: ${error.message}${advice}`;
}

function curl() {
  const body = '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}';
  return `curl ${location.origin}/v1/chat/completions -H "Content-Type: application/json" \\\n  -d '${body}'`;
}

setText(byId("curl"), curl());
startRequests((request) => highlight(request.session, request.cached_tokens));
startSessions(changed, (session) => highlight(session));
startTree();
startChat();
startViews(openRequest, enterChat);
document.addEventListener("visibilitychange", tick);
tick();
