// Asking the owner's paths of the proxy.

import { say } from "./dom.js";

const TIMEOUT_MS = 20_000;

/** The proxy did not answer at all. */
export class Unreachable extends Error {}

/** Something answered that is not this page's proxy, or is of another version. */
export class Unreadable extends Error {}

/** It refused. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET /warmline/`path`. */
export const get = (path, parameters = {}) => ask("GET", `${path}?${new URLSearchParams(parameters)}`);

/** POST /warmline/`path`; takes as long as it takes. */
export const post = (path, body) => ask("POST", path, body);

/** An event's handler that says what went wrong in asking. */
export function tried(act) {
  return async (...given) => {
    try {
      await act(...given);
    } catch (error) {
      if (!isAnswer(error)) throw error;
      say(`That did not work: ${error.message}`);
    }
  };
}

/** Whether that is how an attempt to ask may end. */
export const isAnswer = (error) => [Refused, Unreachable, Unreadable].some((kind) => error instanceof kind);

async function ask(method, path, body) {
  const options = { method, cache: "no-store", redirect: "error" };
  if (method === "GET") options.signal = AbortSignal.timeout(TIMEOUT_MS);
  else {
    options.headers = { "Content-Type": "application/json", "X-Warmline-Admin": "1" };
    options.body = JSON.stringify(body);
  }
  let response;
  let text;
  try {
    response = await fetch(`/warmline/${path}`, options);
    text = await response.text();
  } catch (error) {
    throw new Unreachable(error.message);
  }
  if (response.ok) return parsed(text);
  throw new Refused(response.status, messageIn(text) || `status ${response.status}`);
}

export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Unreadable("what answers is not Warmline's proxy");
  }
}

export function messageIn(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 200);
  }
}
