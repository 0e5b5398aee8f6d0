// The right column: the settings of requests, in groups, and the presets.
import { copy } from "./copying.js";
import { $, el, speak, textButton } from "./dom.js";
import { emit, on } from "./events.js";
import { checkbox, field, group, select, showSettings, slider } from "./fields.js";
import { chats, chosen, mostTokens } from "./models.js";
import { deletePreset, presets, savePreset } from "./presets.js";
import { curl } from "./request.js";
import { change, DEFAULTS, parsed, settings } from "./settings.js";

const TOOL_EXAMPLE = JSON.stringify([{
  type: "function",
  function: {
    name: "weather", description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}], null, 2);
const SCHEMA_EXAMPLE = JSON.stringify({
  type: "object",
  properties: { rivers: { type: "array", items: { type: "string" } } },
  required: ["rivers"],
}, null, 2);
const GRAMMAR_EXAMPLE = 'start: "yes" | "no"';
const FORMS = { text: "free text", json_object: "a JSON object", json_schema: "JSON with a schema", regex: "text that matches a regular expression", grammar: "text of a grammar (Lark or GBNF)" };

const wrong = (id) => el("p", { className: "wrong", id, role: "alert" });
const example = (values, label = "Insert an example") => textButton(label, () => { change(values); showSettings(); });

function presetGroup() {
  const list = el("select", { id: "preset", "aria-label": "Preset" });
  const name = el("input", { type: "text", id: "preset-name", placeholder: "Name of a new preset", "aria-label": "Name of a new preset", maxLength: 60 });
  const problem = wrong("preset-wrong");
  const refresh = (picked = "") => {
    list.replaceChildren(el("option", { value: "" }, "no preset"), ...Object.keys(presets()).map((one) => el("option", { value: one }, one)));
    list.value = picked;
    emit("presets");
  };
  list.addEventListener("change", () => {
    if (!list.value) return;
    change(presets()[list.value]);
    showSettings();
  });
  refresh();
  on("settings", () => {
    // The list names a preset only while the settings are those of the preset.
    const values = presets()[list.value];
    if (values && JSON.stringify(values) !== JSON.stringify({ ...DEFAULTS, ...settings })) list.value = "";
  });
  return group("presets", "Presets", false,
    el("div", { className: "field" }, list), el("div", { className: "field" }, name), problem,
    el("div", { className: "row end" },
      textButton("Delete", () => { deletePreset(list.value); refresh(); }, { "aria-label": "Delete the preset" }),
      textButton("Save the settings", () => {
        problem.textContent = savePreset(name.value || list.value);
        if (problem.textContent) return;
        refresh((name.value || list.value).trim());
        name.value = "";
        speak("The preset is stored");
      })));
}

export function buildPanel() {
  $("controls").append(
    presetGroup(),
    group("system", "System prompt", true,
      field("system", "Instructions for the model", { rows: 4, placeholder: "none" })),
    group("sampling", "Sampling", true,
      slider("temperature", "Temperature", 0, 2, 0.05),
      slider("top_p", "Top-p", 0.05, 1, 0.05),
      slider("min_p", "Min-p", 0, 1, 0.01),
      el("div", { className: "two" },
        field("max_tokens", "Maximum tokens", { type: "number", min: 1 }),
        field("top_k", "Top-k (0: all)", { type: "number", min: 0, placeholder: "0" })),
      el("div", { className: "two" },
        field("seed", "Seed", { type: "number", placeholder: "random" }),
        field("n", "Number of answers", { type: "number", min: 1, max: 8, placeholder: "1" }))),
    group("penalties", "Penalties and stop sequences", false,
      slider("repetition_penalty", "Repetition", 0.5, 2, 0.05),
      slider("presence_penalty", "Presence", -2, 2, 0.1),
      slider("frequency_penalty", "Frequency", -2, 2, 0.1),
      field("stop", "Stop sequences, one per line", { rows: 2, className: "mono", placeholder: "none" })),
    group("tools", "Tools", false,
      field("tools", "Functions, a JSON list", { rows: 7, className: "mono", spellcheck: false, placeholder: "none" }), wrong("tools-wrong"),
      el("div", { className: "row end" }, example({ tools: TOOL_EXAMPLE })),
      select("choice", "Calls", { auto: "automatic", required: "at least one", none: "none" })),
    group("form", "Response format", false,
      select("form", "Format", FORMS),
      field("schema", "Schema, expression or grammar", { rows: 6, className: "mono", spellcheck: false, placeholder: "none" }), wrong("schema-wrong"),
      el("div", { className: "row end" },
        example({ schema: SCHEMA_EXAMPLE, form: "json_schema" }), example({ schema: GRAMMAR_EXAMPLE, form: "grammar" }, "Insert a grammar"))),
    group("tokens", "Probabilities", false,
      checkbox("logprobs", "Return log-probabilities"),
      field("top", "Alternatives per token", { type: "number", min: 0, max: 20, placeholder: "0" })),
    group("request", "Request", false,
      select("mode", "Mode", { auto: "automatic", chat: "chat", text: "text completion" }),
      textButton("Copy the request for curl", (event) => copy(curl(), event.currentTarget))),
  );
  $("defaults").addEventListener("click", () => { change(DEFAULTS); showSettings(); });
  let mode = settings.mode;
  on("settings", () => {
    marks();
    if (settings.mode !== mode) emit("model");
    mode = settings.mode;
  });
  on("model", () => {
    // The number that a request contains while the field is empty.
    $("set-max_tokens").placeholder = String(mostTokens(chosen()));
    $("mode-hint").textContent = chats() ? "" : "This model continues a text.";
    $("prompt").placeholder = chats() ? "Send a message" : "Write the beginning of a text";
  });
  showSettings();
  marks();
}

/** Show in the headings of the groups what is set, and the errors of fields. */
function marks() {
  const set = (id, text) => { $(`group-${id}`).querySelector(".set").textContent = text; };
  const problem = (name) => { try { parsed(name); return ""; } catch (error) { return error.message; } };
  $("tools-wrong").textContent = problem("tools");
  $("schema-wrong").textContent = settings.form === "json_schema" ? problem("schema") : "";
  set("tools", settings.tools.trim() ? "on" : "");
  set("form", { text: "", regex: "regex", grammar: "grammar" }[settings.form] ?? "JSON");
  set("system", settings.system.trim() ? "on" : "");
  set("tokens", settings.logprobs ? "on" : "");
}
