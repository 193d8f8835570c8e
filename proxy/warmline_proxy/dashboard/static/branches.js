// A conversation that branches: each turn has the turns that may follow it, of which one is shown.  Pure.

const randomName = () => crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0");

/** A conversation without turns; JSON can hold it. */
export const createConversation = () => ({ name: `chat ${randomName()}`, count: 0, branches: 1, children: [], shown: 0 });

/** The turns that are shown, from the first to the last. */
export function listTurns(conversation) {
  const turns = [];
  for (let at = conversation; at.children.length; ) turns.push((at = at.children[at.shown]));
  return turns;
}

/** The last turn that is shown, or the conversation itself. */
export const findEnd = (conversation) => listTurns(conversation).at(-1) ?? conversation;

/** What a turn that is shown follows. */
export function findParent(conversation, turn) {
  const turns = listTurns(conversation);
  return turns[turns.indexOf(turn) - 1] ?? conversation;
}

/** Adds and shows a turn after `parent`.  Each branch is a session of its own for the server. */
export function addTurn(conversation, parent, text) {
  const isBranch = parent.children.length > 0;
  if (isBranch) conversation.branches += 1;
  const session = isBranch ? `${conversation.name} branch ${conversation.branches}` : (parent.session ?? conversation.name);
  const turn = { id: (conversation.count += 1), text, session, answer: null, children: [], shown: 0 };
  parent.shown = parent.children.push(turn) - 1;
  return turn;
}

/** Messages that ask for the answer to `turn`: turns before it that were not answered are left out. */
export function buildMessages(conversation, turn, system) {
  const turns = listTurns(conversation);
  const before = turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer.text || answer.reasoning);
  const messages = before.flatMap(({ text, answer }) => [{ role: "user", content: text }, buildAnswer(answer)]);
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...messages, { role: "user", content: turn.text }];
}

function buildAnswer({ text, reasoning }) {
  const message = { role: "assistant", content: text };
  return reasoning ? { ...message, reasoning_content: reasoning } : message; // as it came, to be found in the cache
}
