// Several models: which are loaded, what they hold, and buttons to load, unload and pin them.

import { post, tried } from "./api.js";
import { button, byId, keep, make, say, setAttribute, setText } from "./dom.js";
import { ago, bytes, many } from "./format.js";

const STAGES = {
  unloaded: "not loaded",
  starting: "loading",
  loaded: "loaded",
  stopping: "unloading",
  failed: "failed",
};

export function showModels({ models, at }) {
  byId("models").hidden = models.length === 0;
  const held = models.filter(({ stage }) => stage === "loaded").length;
  setText(byId("models-count"), models.length ? `${held} of ${models.length} loaded` : "");
  keep(byId("model-rows"), models, ({ name }) => name, createModel, (element, model) => updateModel(element, model, at));
}

function createModel({ name }) {
  const act = (verb, body) => tried(async () => {
    await post(`models/${encodeURIComponent(name)}/${verb}`, body());
    say(`${name}: ${verb} was asked for`);
  });
  const row = make("li", "", make("span", "who"), make("span", "phase"), make("span", "amount"), make("span", "actions"));
  const isPinned = () => row.dataset.pinned !== "true";
  const load = button("Load", "quiet", act("load", () => ({ wait: false })));
  const unload = button("Unload", "quiet", act("unload", () => ({ wait: false })));
  const pin = button("Pin", "quiet", act("pin", () => ({ pinned: isPinned() })));
  for (const [each, verb] of [[load, "Load"], [unload, "Unload"], [pin, "Pin or unpin"]]) {
    setAttribute(each, "aria-label", `${verb} ${name}`);
  }
  row.lastChild.append(load, unload, pin);
  return row;
}

function updateModel(row, model, at) {
  const [who, phase, amount, actions] = row.children;
  const [load, unload, pin] = actions.children;
  const marks = [model.default && "default", model.pinned && "pinned"].filter(Boolean);
  setText(who, marks.length ? `${model.name} (${marks.join(", ")})` : model.name);
  setAttribute(who, "title", model.aliases.length ? `also called ${model.aliases.join(", ")}` : null);
  setText(phase, STAGES[model.stage] ?? model.stage);
  setText(amount, [...listMemory(model), ...listRequests(model, at), model.reason, model.wait_reason].filter(Boolean).join(" · "));
  setAttribute(row, "data-pinned", String(model.pinned));
  load.disabled = !["unloaded", "failed"].includes(model.stage);
  unload.disabled = model.stage !== "loaded" || model.pinned;
  setText(pin, model.pinned ? "Unpin" : "Pin");
}

function listMemory({ stage, weight_bytes, need_bytes, kv_bytes }) {
  if (stage === "unloaded" || stage === "failed") return [need_bytes ? `needs ${bytes(need_bytes)}` : ""];
  return [weight_bytes ? `${bytes(weight_bytes)} of weights` : "", kv_bytes ? `${bytes(kv_bytes)} for conversations` : ""];
}

function listRequests({ running, waiting, last_used_at }, at) {
  const used = last_used_at ? `used ${ago(last_used_at, at)}` : "";
  return [running ? `${running} computing` : "", waiting ? `${many(waiting, "request")} waiting` : "", used];
}
