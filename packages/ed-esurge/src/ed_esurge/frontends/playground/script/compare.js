// Comparison: the second model and preset that answer each question beside the first.
import { $, el } from "./dom.js";
import { on } from "./events.js";
import { chosen, inspect, modelOptions } from "./models.js";
import { presets } from "./presets.js";
import { settings } from "./settings.js";
import { TAB, keep, recall } from "./storage.js";

const state = recall(TAB, "compare", { on: false, model: "", preset: "" });

export const compares = () => state.on;

/** Return both variants: {model, values, label}. */
export function variants() {
  const second = presets()[$("compare-preset").value];
  return [
    { model: chosen(), values: settings, label: "current settings" },
    { model: $("compare-model").value, values: second ?? settings, label: second ? $("compare-preset").value : "current settings" },
  ];
}

function options() {
  $("compare-model").replaceChildren(...modelOptions());
  $("compare-model").value = state.model;
  if (!$("compare-model").value) $("compare-model").selectedIndex = 0;
  $("compare-preset").replaceChildren(el("option", { value: "" }, "current settings"), ...Object.keys(presets()).map((name) => el("option", { value: name }, name)));
  $("compare-preset").value = state.preset;
  if (!$("compare-preset").value) $("compare-preset").value = "";
}

function apply() {
  $("compare").setAttribute("aria-pressed", String(state.on));
  $("compared-with").hidden = !state.on;
  keep(TAB, "compare", state);
}

export function buildCompare() {
  $("compare").addEventListener("click", () => { state.on = !state.on; apply(); });
  $("compare-model").addEventListener("change", () => { state.model = $("compare-model").value; inspect(state.model); apply(); });
  $("compare-preset").addEventListener("change", () => { state.preset = $("compare-preset").value; apply(); });
  on("model", options);
  on("presets", options);
  apply();
}
