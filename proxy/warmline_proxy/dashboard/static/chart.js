// Reuse over time, from the history that GET /warmline/activity adds up: figures, bars and a table.

import { byId, describe, keep, make, setText } from "./dom.js";
import { clock, count, many, seconds, share, short } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 480;
const HEIGHT = 96;
const GAP = 1.5;
const BARS_MIN = 12; // what is younger stands at the right
const COLD = "median of those that reused fewer than 64 tokens and less than half of their prompt";
let shown = "";

export function showHistory(history) {
  const signature = JSON.stringify(history);
  if (signature === shown) return;
  shown = signature;
  const { buckets, requests, hits, prompt_tokens, cached_tokens } = history;
  setText(byId("reuse-span"), requests ? `of the last ${many(requests, "request")}` : "none yet");
  describe(byId("figures"), [
    ["prompt tokens reused", share(cached_tokens, prompt_tokens), `${count(cached_tokens)} of ${count(prompt_tokens)}`],
    ["tokens spared", short(cached_tokens), `${count(cached_tokens)} tokens were not computed again`],
    ["warm requests", share(hits, requests), `${count(hits)} of ${count(requests)}: they reused 64 tokens or more`],
    ["first token, warm", history.ttft_warm_s ? seconds(history.ttft_warm_s) : "–", "median of the warm requests"],
    ["first token, cold", history.ttft_cold_s ? seconds(history.ttft_cold_s) : "–", COLD],
  ]);
  const bars = padded(buckets, history.width_s);
  drawBars(bars, `${share(cached_tokens, prompt_tokens)} of the prompt tokens were reused`);
  const most = Math.max(...bars.map((bucket) => bucket.prompt_tokens));
  setText(byId("chart-from"), clock(bars[0].at));
  setText(byId("chart-most"), most ? many(most, "prompt token") : "");
  setText(byId("chart-until"), clock(bars.at(-1).at + history.width_s));
  fillTable(buckets.filter((bucket) => bucket.requests));
}

function padded(buckets, width_s) {
  const missing = Math.max(0, BARS_MIN - buckets.length);
  const before = Array.from({ length: missing }, (_, place) => buckets[0].at - (missing - place) * width_s);
  return [...before.map((at) => ({ at, prompt_tokens: 0, cached_tokens: 0 })), ...buckets];
}

function drawBars(buckets, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Prompt tokens over time: ${label}`);
  const most = Math.max(1, ...buckets.map((bucket) => bucket.prompt_tokens));
  const step = WIDTH / buckets.length;
  buckets.forEach((bucket, place) => {
    const tall = (tokens) => (tokens ? Math.max(1, (HEIGHT * tokens) / most) : 0);
    const cached = tall(bucket.cached_tokens);
    const computed = tall(bucket.prompt_tokens - bucket.cached_tokens);
    const bar = document.createElementNS(SVG, "g");
    bar.append(
      rectangle("warm", place * step, HEIGHT - cached, step - GAP, cached),
      rectangle("cold", place * step, HEIGHT - cached - computed, step - GAP, computed),
    );
    svg.append(bar);
  });
  byId("chart").replaceChildren(svg);
}

function rectangle(className, x, y, width, height) {
  const element = document.createElementNS(SVG, "rect");
  element.setAttribute("class", className);
  for (const [name, value] of Object.entries({ x, y, width, height })) element.setAttribute(name, value.toFixed(2));
  return element;
}

function fillTable(buckets) {
  keep(
    byId("chart-rows"),
    buckets,
    (bucket) => bucket.at,
    () => make("tr", "", ...Array.from({ length: 5 }, () => make("td"))),
    (row, bucket) => {
      const { at, requests, hits, prompt_tokens, cached_tokens } = bucket;
      const texts = [clock(at), ...[requests, hits, prompt_tokens, cached_tokens].map(count)];
      texts.forEach((text, column) => setText(row.children[column], text));
    },
  );
}
