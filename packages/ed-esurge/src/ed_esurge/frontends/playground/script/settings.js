// The values of the settings. The right column edits these values, and requests contain them.
import { emit } from "./events.js";
import { TAB, keep, recall } from "./storage.js";

export const DEFAULTS = {
  mode: "auto", system: "", temperature: 0.7, top_p: 1, top_k: 0, min_p: 0, max_tokens: "", seed: "",
  n: 1, stop: "", repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0,
  logprobs: true, top: 5, tools: "", choice: "auto", form: "text", schema: "",
};
export const settings = { ...DEFAULTS, ...known(recall(TAB, "settings", {})) };

/** Return the entries that are settings of the right type. */
export function known(values) {
  const right = ([name, value]) => name in DEFAULTS
    && (typeof value === typeof DEFAULTS[name] || (["max_tokens", "seed"].includes(name) && typeof value === "number"));
  return Object.fromEntries(Object.entries(values ?? {}).filter(right));
}

export function change(values) {
  Object.assign(settings, values);
  keep(TAB, "settings", settings);
  emit("settings");
}

/** Return a JSON setting as a value, or null if the setting is empty. */
export function parsed(name, values = settings) {
  const text = values[name].trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (name === "tools" && !Array.isArray(value)) throw new Error("Tools must be a list: [ … ]");
  return value;
}
