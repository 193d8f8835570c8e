// The chat: a client of the proxy in the page, which shows what of each prompt was reused.  The conversation is this tab's.

import { Refused, get, isAnswer } from "./api.js";
import { addTurn, buildMessages, createConversation, findEnd, findParent, listTurns } from "./branches.js";
import { streamChat } from "./completion.js";
import { confirm } from "./dialog.js";
import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { createTurn, updateTurn } from "./turn.js";

const STORE = "warmline-chat";
const FIELDS = ["chat-text", "chat-system", "chat-tokens"]; // the key is not stored
const UNAUTHORIZED = 401;
const RECORD_RESTS_MS = [50, 200, 500, 1000, 2000, 4000, 8000, 16_000]; // a request's record comes once it is saved
const RECORDS_READ = 50;
const NEAR_END_PX = 120;
const view = {
  conversation: createConversation(),
  running: null,
  stop: null,
  editing: 0,
  needsKey: false,
  hasAsked: false,
  isDue: false,
};

export function startChat() {
  restore();
  byId("chat-send").addEventListener("click", () => (view.running ? view.stop.abort() : sendMessage()));
  byId("chat-new").addEventListener("click", startAnew);
  byId("chat-text").addEventListener("keydown", (event) => onEnter(event, sendMessage));
  document.addEventListener("keydown", (event) => {
    const isHere = !byId("chat-view").hidden && !byId("dialog").open && !event.defaultPrevented;
    if (event.key === "Escape" && isHere) view.stop?.abort();
  });
  addEventListener("pagehide", store);
  byId("chat-settings").open = matchMedia("(min-width: 44rem)").matches;
  draw();
}

/** The view was opened: asks once whether clients need a key. */
export function enterChat() {
  if (!view.hasAsked) askForKeys();
  view.hasAsked = true;
}

/** Of several models, one can be chosen. */
export function showChatModels({ models }) {
  byId("chat-model-label").hidden = models.length < 2;
  const create = ({ name }) => new Option(name, name);
  keep(byId("chat-model"), models, ({ name }) => name, create, (option, model) => {
    option.defaultSelected = model.default;
    setText(option, model.stage === "loaded" ? model.name : `${model.name} (not loaded)`);
  });
}

/** Whether clients need a key.  Where that can't be asked, a refusal tells. */
async function askForKeys() {
  try {
    showKeyField((await get("whose")).keys.length > 0);
  } catch (error) {
    if (!isAnswer(error)) throw error;
  }
}

function showKeyField(isNeeded) {
  view.needsKey = isNeeded;
  byId("chat-key-field").hidden = !isNeeded;
}

// --- sending

const sendMessage = () => {
  if (send(findEnd(view.conversation), byId("chat-text").value)) byId("chat-text").value = "";
};

const sendEdited = (turn, text) => {
  if (send(findParent(view.conversation, turn), text)) byId("chat-text").focus();
};

/** False where nothing is sent: the text stays where it is. */
function send(parent, text) {
  if (view.running || !text.trim() || isKeyMissing()) return false;
  view.editing = 0;
  answer(addTurn(view.conversation, parent, text));
  return true;
}

function isKeyMissing() {
  const isMissing = view.needsKey && !byId("chat-key").value;
  if (isMissing) {
    byId("chat-settings").open = true;
    byId("chat-key").focus();
    announce("Enter a client key first.");
  }
  return isMissing;
}

async function answer(turn) {
  const reply = { state: "running", text: "", reasoning: "", error: "", request: "", source: "", cached: 0, prompt: 0 };
  Object.assign(reply, { generated: 0, first_s: 0, tokens_per_s: 0, isCut: false, progress: null, why: null });
  turn.answer = reply;
  Object.assign(view, { running: turn, stop: new AbortController() });
  draw();
  byId("turns").lastElementChild.scrollIntoView({ block: "nearest" });
  announce("Answering.");
  try {
    await read(reply, turn);
    reply.state = "done";
  } catch (error) {
    reply.state = view.stop.signal.aborted ? "stopped" : "failed";
    if (reply.state === "failed") reply.error = error.message;
    if (error instanceof Refused && error.status === UNAUTHORIZED) showKeyField(true);
    if (reply.state === "failed" && !isAnswer(error)) throw error;
  } finally {
    Object.assign(view, { running: null, stop: null });
    draw();
    store();
    announce(describeEnd(reply));
    findRecord(reply);
  }
}

async function read(reply, turn) {
  const begun = performance.now();
  const access = { key: byId("chat-key").value, session: turn.session, signal: view.stop.signal };
  let first = 0;
  let last = 0;
  for await (const piece of streamChat(buildBody(turn), access)) {
    if (piece.start) Object.assign(reply, { request: piece.request, ...piece.start });
    if (piece.progress) reply.progress = piece.progress;
    if (piece.content || piece.reasoning) {
      first ||= performance.now();
      last = performance.now();
      reply.first_s = (first - begun) / 1000;
      reply.text += piece.content;
      reply.reasoning += piece.reasoning;
    }
    if (piece.finish === "length") reply.isCut = true;
    if (piece.usage) {
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = piece.usage;
      const counts = { prompt: prompt_tokens, cached: prompt_tokens_details?.cached_tokens ?? 0, generated: completion_tokens };
      const tokens_per_s = last > first ? (1000 * (completion_tokens - 1)) / (last - first) : 0;
      Object.assign(reply, counts, { tokens_per_s });
    }
    drawSoon();
  }
}

function buildBody(turn) {
  const messages = buildMessages(view.conversation, turn, byId("chat-system").value.trim());
  const body = { messages, stream: true, stream_options: { include_usage: true }, return_progress: true };
  if (!byId("chat-model-label").hidden) body.model = byId("chat-model").value;
  if (byId("chat-tokens").value) body.max_tokens = Number(byId("chat-tokens").value);
  return body;
}

/** The request's record tells why it was not warmer, and of a stopped one all numbers. */
async function findRecord(reply) {
  if (!reply.request) return;
  for (const rest_ms of RECORD_RESTS_MS) {
    await new Promise((resolve) => setTimeout(resolve, rest_ms));
    try {
      const { requests } = await get("activity", { offset: 0, count: RECORDS_READ });
      const record = requests.find(({ id }) => id === reply.request);
      if (!record) continue;
      const { source, prompt_tokens: prompt, cached_tokens: cached, generated_tokens: generated } = record;
      Object.assign(reply, { source, prompt, cached, generated });
      reply.tokens_per_s ||= record.decode_tokens_per_s;
      reply.why = (await get("explain", { request: reply.request })).verdict;
      break;
    } catch (error) {
      if (!isAnswer(error)) throw error;
    }
  }
  draw();
  store();
}

async function startAnew() {
  if (view.running) return;
  const what = [make("p", "", "This page forgets the conversation. What the server has stored of it stays, and is reused.")];
  if (view.conversation.count && !(await confirm("Begin a new chat?", what, "New chat"))) return;
  Object.assign(view, { conversation: createConversation(), editing: 0 });
  draw();
  store();
  byId("chat-text").focus();
}

/** Enter, but not one that ends the input of a character. */
function onEnter(event, act) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  act();
}

// --- showing

const actions = {
  edit: (turn) => {
    view.editing = turn.id;
    draw();
  },
  cancelEdit: (turn) => {
    view.editing = 0;
    draw();
    byId(`turn-${turn.id}`).querySelector(".edit").focus();
  },
  sendEdited,
  onEnter,
  retry: (turn) => {
    if (view.running || isKeyMissing()) return;
    answer(turn);
    byId("chat-text").focus();
  },
  /** Shows the branch `by` places further on, and keeps the focus on the button for the next one. */
  turnBranch: (turn, by) => {
    const parent = findParent(view.conversation, turn);
    parent.shown += by;
    view.editing = 0;
    draw();
    store();
    const [back, on] = byId(`turn-${parent.children[parent.shown].id}`).querySelectorAll(".branches button");
    const [wanted, other] = by < 0 ? [back, on] : [on, back];
    (wanted.disabled ? other : wanted).focus();
  },
};

/** Once a frame is enough, however fast tokens come. */
function drawSoon() {
  if (view.isDue) return;
  view.isDue = true;
  requestAnimationFrame(() => {
    view.isDue = false;
    draw();
  });
}

function draw() {
  const page = document.documentElement;
  const height = page.scrollHeight;
  const isAtEnd = height - page.clientHeight - page.scrollTop < NEAR_END_PX;
  const turns = listTurns(view.conversation);
  byId("chat-empty").hidden = turns.length > 0;
  const create = (turn) => createTurn(turn, actions);
  keep(byId("turns"), turns, ({ id }) => id, create, (element, turn) => {
    const { children, shown } = findParent(view.conversation, turn);
    const isEditing = view.editing === turn.id;
    updateTurn(element, turn, { place: shown, count: children.length, isEditing, isBusy: Boolean(view.running) });
  });
  setText(byId("chat-send"), view.running ? "Stop" : "Send");
  setAttribute(byId("chat-send"), "data-runs", view.running ? "" : null);
  byId("chat-new").disabled = Boolean(view.running) || !turns.length;
  const hasGrown = page.scrollHeight > height && !view.editing && !byId("chat-view").hidden;
  if (isAtEnd && hasGrown) page.scrollTop = page.scrollHeight;
}

/** Once an answer is whole: its pieces would interrupt each other. */
const announce = (text) => setText(byId("chat-said"), text);

function describeEnd({ state, text, error }) {
  if (state === "failed") return `Not answered: ${error}`;
  return state === "stopped" ? `Stopped. ${text}` : text || "The answer is empty.";
}

// --- over a reload

function store() {
  const fields = FIELDS.map((id) => byId(id).value);
  try {
    sessionStorage.setItem(STORE, JSON.stringify({ conversation: view.conversation, fields }));
  } catch {
    // What is too large for it, or not allowed, does not outlast a reload.
  }
}

function restore() {
  const stored = JSON.parse(sessionStorage.getItem(STORE) ?? "null");
  if (!stored) return;
  view.conversation = stored.conversation;
  FIELDS.forEach((id, place) => (byId(id).value = stored.fields[place]));
  const { answer: left } = findEnd(view.conversation);
  if (left?.state === "running") left.state = "stopped"; // the page was left
}
