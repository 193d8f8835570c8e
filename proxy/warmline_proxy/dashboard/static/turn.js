// One turn of the chat as elements: the message, the answer as it comes, what was reused and why no more.

import { button, keep, make, setAttribute, setText } from "./dom.js";
import { count, seconds, share } from "./format.js";

const WARM = "warm"; // the cause of a request that had nothing left to reuse

/** `actions`: what its buttons do, each with the turn. */
export function createTurn(turn, actions) {
  const element = make("li", "turn", createMessage(turn, actions), createAnswer(turn, actions));
  element.id = `turn-${turn.id}`;
  return element;
}

function createMessage(turn, actions) {
  const text = make("p", "text", turn.text);
  const back = button("‹", "quiet", () => actions.turnBranch(turn, -1));
  const on = button("›", "quiet", () => actions.turnBranch(turn, 1));
  setAttribute(back, "aria-label", "Earlier branch");
  setAttribute(on, "aria-label", "Later branch");
  const branches = make("span", "branches", back, make("span", "place"), on);
  const tools = make("div", "tools", branches, button("Edit", "quiet edit", () => actions.edit(turn)));
  return make("div", "message", make("h3", "spoken", "You"), text, createEditor(turn, actions), tools);
}

function createEditor(turn, actions) {
  const field = make("textarea");
  field.rows = 3;
  setAttribute(field, "aria-label", "Edited message");
  field.addEventListener("keydown", (event) => {
    actions.onEnter(event, () => actions.sendEdited(turn, field.value));
    if (event.key !== "Escape") return;
    event.preventDefault(); // an answer that runs goes on
    actions.cancelEdit(turn);
  });
  const cancel = button("Cancel", "quiet", () => actions.cancelEdit(turn));
  const send = button("Send as a branch", "quiet", () => actions.sendEdited(turn, field.value));
  const editor = make("div", "editor", field, make("div", "tools", cancel, send));
  editor.hidden = true;
  return editor;
}

function createAnswer(turn, actions) {
  const reasoning = make("details", "reasoning", make("summary"), make("div", "text"));
  const bar = make("div", "bar", make("i"), make("i")); // reused, computed
  setAttribute(bar, "role", "progressbar");
  setAttribute(bar, "aria-label", "prompt tokens with rows");
  setAttribute(bar, "aria-valuemin", 0);
  const progress = make("div", "progress", bar, make("span", "note"));
  const failure = make("div", "failure", make("p"), button("Try again", "quiet", () => actions.retry(turn)));
  const why = make("p", "note miss", make("b"), " ", make("span"), " ", make("a", "", "Explain"));
  const parts = [make("h3", "spoken", "Answer"), reasoning, make("div", "text"), progress, failure, createReuse(), why];
  return make("div", "answer", ...parts);
}

function createReuse() {
  const bar = make("span", "bar", make("i"), make("i"));
  setAttribute(bar, "aria-hidden", "true");
  return make("p", "reuse", make("b", "source"), bar, make("span"), make("span"), make("span"));
}

/** Writes what a turn is now; `place` of `count` branches is shown. */
export function updateTurn(element, turn, { place, count: branchCount, isEditing, isBusy }) {
  const [message, reply] = element.children;
  const [, text, editor, tools] = message.children;
  const [branches, edit] = tools.children;
  if (isEditing && editor.hidden) openEditor(text, editor, tools, turn);
  text.hidden = tools.hidden = isEditing;
  editor.hidden = !isEditing;
  editor.lastChild.lastChild.disabled = edit.disabled = isBusy;
  branches.hidden = branchCount < 2;
  const [back, shown, on] = branches.children;
  setText(shown, `${place + 1}/${branchCount}`);
  back.disabled = place === 0;
  on.disabled = place === branchCount - 1;
  if (turn.answer) updateAnswer(reply, turn.answer, isBusy, turn.children.length === 0);
}

function openEditor(text, editor, tools, turn) {
  editor.firstChild.value = turn.text;
  text.hidden = tools.hidden = true;
  editor.hidden = false;
  editor.firstChild.focus();
}

function updateAnswer(element, answer, isBusy, isLast) {
  const [, reasoning, text, progress, failure, reuse, why] = element.children;
  const isRunning = answer.state === "running";
  reasoning.hidden = !answer.reasoning;
  setText(reasoning.firstChild, isRunning && !answer.text ? "Reasoning…" : "Reasoning");
  setText(reasoning.lastChild, answer.reasoning);
  showText(text, answer.text);
  progress.hidden = !isRunning || Boolean(answer.text || answer.reasoning);
  updateProgress(progress, answer);
  const note = describeEnd(answer);
  failure.hidden = !note;
  failure.classList.toggle("bad", answer.state === "failed");
  setText(failure.firstChild, note);
  failure.lastChild.hidden = answer.state === "done" || !isLast;
  failure.lastChild.disabled = isBusy;
  reuse.hidden = isRunning || !answer.prompt;
  updateReuse(reuse, answer);
  updateWhy(why, answer);
}

/** What stands between lines of three backticks is code. */
function showText(element, text) {
  const blocks = text.split(/^[ \t]*```.*\n?/m).map((block, place) => ({ place, block: block.replace(/\n$/, "") }));
  const create = ({ place }) => make(place % 2 ? "pre" : "p");
  const shown = blocks.filter(({ block }) => block);
  keep(element, shown, ({ place }) => place, create, (each, { block }) => setText(each, block));
}

function updateProgress(element, { progress, cached }) {
  const [bar, note] = element.children;
  const { done, total, loading } = progress ?? { done: 0, total: 0, loading: "" };
  bar.hidden = !total;
  setAttribute(bar, "aria-valuemax", Math.max(1, total));
  setAttribute(bar, "aria-valuenow", done);
  setWidths(bar, Math.min(cached, done), Math.max(0, done - cached), total);
  const prefill = total ? `Prefilling: ${count(done)} of ${count(total)} tokens` : "Waiting for the first token…";
  setText(note, loading ? `Loading ${loading}…` : prefill);
}

function describeEnd({ state, error, isCut, text, reasoning }) {
  const left = text || reasoning ? "" : " Later messages are sent without this one.";
  if (state === "failed") return `${error}${left}`;
  if (state === "stopped") return `Stopped.${left}`;
  return isCut ? "Cut at the limit of tokens." : "";
}

function updateReuse(element, { source, cached, prompt, first_s, tokens_per_s }) {
  const [name, bar, tokens, first, rate] = element.children;
  setText(name, source || "cold");
  setAttribute(name, "data-start", cached ? "warm" : "cold");
  setWidths(bar, cached, prompt - cached, prompt);
  setText(tokens, `${count(cached)} of ${count(prompt)} prompt tokens reused (${share(cached, prompt)})`);
  setText(first, first_s ? `first token after ${seconds(first_s)}` : "");
  setText(rate, tokens_per_s ? `${tokens_per_s.toFixed(1)} tokens/s` : "");
}

function updateWhy(element, { why, request }) {
  const [cause, means, link] = element.children;
  element.hidden = !why;
  if (!why) return;
  cause.hidden = means.hidden = why.cause === WARM;
  setText(cause, why.cause);
  setText(means, `${why.means} ${why.detail}`.trim());
  setAttribute(link, "href", `#request=${request}`);
}

function setWidths(bar, warm, cold, all) {
  const part = (tokens) => `${all ? Math.min(100, (100 * tokens) / all) : 0}%`;
  bar.firstChild.style.width = part(warm);
  bar.lastChild.style.width = part(cold);
}
