// Named presets: copies of all settings, stored in the browser.
import { DEFAULTS, known, settings } from "./settings.js";
import { BROWSER, keep, recall } from "./storage.js";

const MOST = 50, LONGEST = 60;

export function presets() {
  return Object.fromEntries(Object.entries(recall(BROWSER, "presets", {})).map(([name, values]) => [name, { ...DEFAULTS, ...known(values) }]));
}

/** Store the settings under a name. Return an error message, or an empty text. */
export function savePreset(name) {
  const all = presets();
  if (!name.trim()) return "Enter a name for the preset.";
  if (name.length > LONGEST) return `A name has at most ${LONGEST} characters.`;
  if (!(name in all) && Object.keys(all).length >= MOST) return `The browser stores at most ${MOST} presets. Delete a preset first.`;
  keep(BROWSER, "presets", { ...all, [name.trim()]: { ...settings } });
  return "";
}

export function deletePreset(name) {
  const all = presets();
  delete all[name];
  keep(BROWSER, "presets", all);
}
