// Numbers and times as text, the same in every locale.

const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const two = (number) => String(number).padStart(2, "0");

/** 12345 as "12,345". */
export const count = (number) => String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, ",");

/** "1 segment", "2 segments". */
export const many = (number, noun, nouns = `${noun}s`) => `${count(number)} ${number === 1 ? noun : nouns}`;

const digits = (number) => (number >= 100 || Number.isInteger(number) ? number.toFixed(0) : number.toFixed(1));

/** 12345 as "12.3k". */
export function short(number) {
  if (number < 10_000) return count(number);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return digits(number / size) + unit;
  }
  return count(number);
}

/** In units of 1,000, as disks are sold and budgets are set. */
export function bytes(number) {
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) [number, unit] = [number / 1000, unit + 1];
  return `${unit ? digits(number) : count(number)} ${UNITS[unit]}`;
}

export function seconds(number) {
  if (number <= 0) return "0 s";
  if (number < 0.0995) return `${(number * 1000).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 60) return `${number.toFixed(number < 9.95 ? 2 : 1)} s`;
  const whole = Math.round(number);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 48 * 3600) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86_400)} days`;
}

/** Of something that goes on: in whole seconds. */
export const age = (number) => (number < 60 ? `${Math.floor(Math.max(0, number))} s` : seconds(number));

export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part < whole ? 1 : 0)} %` : "–");

/** Unix seconds as "17:02:09", with the day where it is not today's, and that alone where it is another year's. */
export function clock(at) {
  const then = new Date(at * 1000);
  const time = `${two(then.getHours())}:${two(then.getMinutes())}:${two(then.getSeconds())}`;
  const now = new Date();
  if (then.getFullYear() !== now.getFullYear()) return `${day(then)} ${then.getFullYear()}`;
  return then.toDateString() === now.toDateString() ? time : `${day(then)} ${time.slice(0, 5)}`;
}

/** Title of a conversation, or else as its client calls it, or else by when it was first stored. */
export const nameOf = ({ title, client, created }) => title || client || `conversation started ${clock(created)}`;

const day = (then) => `${then.getDate()} ${MONTHS[then.getMonth()]}`;

/** With what can't be seen, or turns other text around, spelled out: "\u{200b}". */
export const visible = (text) =>
  text.replace(/(?![\n\t])[\p{C}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);

/** "3 min ago". */
export function ago(at, now) {
  const passed = Math.max(0, now - at);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 48 * 3600) return `${Math.floor(passed / 3600)} h ago`;
  return passed < 400 * 86_400 ? `${Math.floor(passed / 86_400)} days ago` : `${new Date(at * 1000).getFullYear()}`;
}
