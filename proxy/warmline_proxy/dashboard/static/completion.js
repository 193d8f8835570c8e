// One request to /v1/chat/completions, streamed, as any client sends it: the owner's access opens nothing here.

import { Refused, Unreachable, messageIn, parsed } from "./api.js";

/**
 * Pieces of an answer as they come: { request, start }, { progress }, { content, reasoning, finish }, { usage }.
 * `key`: a client key, "" for none.  Throws Refused and Unreachable, and what the signal throws where it is aborted.
 */
export async function* streamChat(body, { key, session, signal }) {
  const response = await send(body, { key, session, signal });
  const [source = "", cached = "0"] = (response.headers.get("X-Warmline-Cache") ?? "").split(" ");
  yield { request: response.headers.get("X-Warmline-Request") ?? "", start: { source, cached: Number(cached) } };
  for await (const event of readEvents(response.body, signal)) {
    if (event.data === "[DONE]") return;
    const chunk = event.data ? parsed(event.data) : {};
    if (chunk.error) throw new Refused(response.status, chunk.error.message ?? "The answer failed.");
    const progress = readProgress(event.comment, chunk);
    if (progress) yield { progress };
    const choice = chunk.choices?.[0];
    if (choice) {
      const { content, reasoning_content, reasoning } = choice.delta ?? {};
      yield { content: content ?? "", reasoning: reasoning_content ?? reasoning ?? "", finish: choice.finish_reason ?? "" };
    }
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new Unreachable("the connection ended before the answer did");
}

/** How far a prompt is, from a comment of the stream or from a chunk; null where neither tells. */
export function readProgress(comment, { prompt_progress, loading }) {
  if (prompt_progress) return { done: prompt_progress.processed, total: prompt_progress.total, loading: loading ?? "" };
  const prefill = /^prefill (\d+)\/(\d+)/.exec(comment);
  return prefill && { done: Number(prefill[1]), total: Number(prefill[2]), loading: "" };
}

async function send(body, { key, session, signal }) {
  const headers = { "Content-Type": "application/json", "X-Session-Id": session };
  if (key) headers["X-Api-Key"] = key; // beside what the browser itself may put into Authorization
  const options = { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store", redirect: "error" };
  const response = await reached(fetch("/v1/chat/completions", options), signal);
  if (response.ok) return response;
  throw new Refused(response.status, messageIn(await reached(response.text(), signal)) || `status ${response.status}`);
}

async function* readEvents(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read(), signal);
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) yield parseEvent(event.split("\n"));
  }
}

function parseEvent(lines) {
  const valuesOf = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trimStart());
  return { comment: valuesOf(":").join(" "), data: valuesOf("data:").join("\n") };
}

/** What the network gives; the browser's own words for its failures say little. */
async function reached(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    signal.throwIfAborted();
    throw new Unreachable(`the connection to the proxy failed (${error.message})`);
  }
}
