// Settings: the fields of the right column, and the request with their values.
const DEFAULTS = {
  mode: "auto", system: "", temperature: 0.7, top_p: 1, top_k: 0, min_p: 0, max_tokens: "", seed: "",
  n: 1, stop: "", repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0,
  logprobs: true, top: 5, tools: "", choice: "auto", form: "text", schema: "",
};
let settings = { ...DEFAULTS, ...recall(TAB, "settings", {}) };
const chats = () => settings.mode === "chat" || (settings.mode === "auto" && speaks);

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

const FIELDS = {}; // name -> function that shows the value of a setting in its control

function changed(name, value) {
  settings[name] = value;
  keep(TAB, "settings", settings);
  marks();
}

function slider(name, label, min, max, step) {
  const id = `set-${name}`;
  const range = el("input", { type: "range", min, max, step, id, "aria-label": label });
  const number = el("input", { type: "number", min, max, step, id: `${id}-number` });
  const both = (source) => () => {
    if (source.value === "" || !Number.isFinite(+source.value)) return;
    (source === range ? number : range).value = source.value;
    changed(name, +source.value);
  };
  range.addEventListener("input", both(range));
  number.addEventListener("input", both(number));
  FIELDS[name] = () => { range.value = number.value = settings[name]; };
  return el("div", { className: "field" }, el("div", { className: "top" }, el("label", { htmlFor: number.id }, label), number), range);
}

function field(name, label, props = {}, note = "") {
  const id = `set-${name}`;
  const area = props.rows !== undefined;
  const input = el(area ? "textarea" : "input", { id, ...props, type: area ? undefined : props.type ?? "text" });
  input.addEventListener("input", () => {
    const numeric = props.type === "number" && input.value !== "";
    changed(name, numeric ? +input.value : input.value);
  });
  FIELDS[name] = () => { input.value = settings[name]; };
  return el("div", { className: "field" }, el("label", { htmlFor: id }, label), input, note && el("p", { className: "note" }, note));
}

function select(name, label, options) {
  const id = `set-${name}`;
  const input = el("select", { id }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  input.addEventListener("change", () => { changed(name, input.value); choose().then(draw, draw); });
  FIELDS[name] = () => { input.value = settings[name]; };
  return el("div", { className: "field" }, el("label", { htmlFor: id }, label), input);
}

function group(id, title, open, ...inner) {
  return el("details", { className: "group", id: `group-${id}`, open },
    el("summary", {}, title, el("span", { className: "set" })), el("div", { className: "inner" }, inner));
}

const wrong = (id) => el("p", { className: "wrong", id, role: "alert" });

function buildSettings() {
  const logs = el("input", { type: "checkbox", id: "set-logprobs" });
  logs.addEventListener("change", () => changed("logprobs", logs.checked));
  FIELDS.logprobs = () => { logs.checked = settings.logprobs; };
  const example = (name, text, also) => el("button", { type: "button", className: "text", onclick: () => {
    changed(name, text);
    also?.();
    showSettings();
  } }, "Insert an example");
  $("controls").append(
    group("system", "System prompt", true,
      field("system", "Instructions for the model", { rows: 4, placeholder: "You are…" })),
    group("sampling", "Sampling", true,
      slider("temperature", "Temperature", 0, 2, 0.05),
      slider("top_p", "Top-p", 0.05, 1, 0.05),
      slider("min_p", "Min-p", 0, 1, 0.01),
      el("div", { className: "two" },
        field("max_tokens", "Maximum tokens", { type: "number", min: 1, placeholder: "1024" }),
        field("top_k", "Top-k (0: all)", { type: "number", min: 0 })),
      el("div", { className: "two" },
        field("seed", "Seed", { type: "number", placeholder: "random" }),
        field("n", "Number of answers", { type: "number", min: 1, max: 8 }))),
    group("penalties", "Penalties and stop sequences", false,
      slider("repetition_penalty", "Repetition", 0.5, 2, 0.05),
      slider("presence_penalty", "Presence", -2, 2, 0.1),
      slider("frequency_penalty", "Frequency", -2, 2, 0.1),
      field("stop", "Stop sequences, one per line", { rows: 2, className: "mono" })),
    group("tools", "Tools", false,
      field("tools", "Functions, a JSON list", { rows: 7, className: "mono", spellcheck: false }), wrong("tools-wrong"),
      el("div", { className: "row end" }, example("tools", TOOL_EXAMPLE)),
      select("choice", "Calls", { auto: "automatic", required: "at least one", none: "none" })),
    group("form", "Response format", false,
      select("form", "Format", { text: "free text", json_object: "a JSON object", json_schema: "JSON with a schema", regex: "text that matches a regular expression" }),
      field("schema", "Schema, or expression", { rows: 6, className: "mono", spellcheck: false }), wrong("schema-wrong"),
      el("div", { className: "row end" }, example("schema", SCHEMA_EXAMPLE, () => changed("form", "json_schema")))),
    group("tokens", "Probabilities", false,
      el("label", { className: "check" }, logs, "Return log-probabilities"),
      field("top", "Alternatives per token", { type: "number", min: 0, max: 20 })),
    group("request", "Request", false,
      select("mode", "Mode", { auto: "automatic", chat: "chat", text: "text completion" }),
      el("button", { type: "button", className: "text", onclick: (event) => copy(curl(), event.currentTarget) }, "Copy the request for curl")),
  );
  $("defaults").addEventListener("click", () => {
    settings = { ...DEFAULTS };
    keep(TAB, "settings", settings);
    showSettings();
  });
  showSettings();
}

function showSettings() {
  for (const update of Object.values(FIELDS)) update();
  marks();
}

/** Show in the headings of the groups what is set, and the errors of fields. */
function marks() {
  const set = (id, text) => { $(`group-${id}`).querySelector(".set").textContent = text; };
  const problem = (name) => { try { parsed(name); return ""; } catch (error) { return error.message; } };
  $("tools-wrong").textContent = problem("tools");
  $("schema-wrong").textContent = settings.form === "json_schema" ? problem("schema") : "";
  set("tools", settings.tools.trim() ? "on" : "");
  set("form", settings.form === "text" ? "" : settings.form === "regex" ? "regex" : "JSON");
  set("system", settings.system.trim() ? "on" : "");
  set("tokens", settings.logprobs ? "on" : "");
}

function parsed(name) {
  const text = settings[name].trim();
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

/** Return the request that continues a branch. `from` is the answer to continue. */
function requestFor(nodes, from) {
  const body = { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]) {
    body[name] = settings[name];
  }
  if (+settings.top_k > 0) body.top_k = +settings.top_k;
  // At most the free part of the context of a small model.
  body.max_tokens = settings.max_tokens === "" ? Math.min(1024, Math.ceil((card()?.max_model_len ?? 1024) / 2)) : +settings.max_tokens;
  if (settings.seed !== "") body.seed = +settings.seed;
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (!from && +settings.n > 1) body.n = +settings.n;
  const schema = settings.form === "json_schema" ? parsed("schema") : null;
  if (settings.form === "regex" && settings.schema) body.guided_regex = settings.schema;
  if (!chats()) {
    if (settings.logprobs) body.logprobs = +settings.top;
    if (schema) body.guided_json = schema;
    if (settings.form === "json_object") body.guided_json = { type: "object" };
    body.prompt = nodes.map((node) => node.text).join("") + (from?.text ?? "");
    return ["v1/completions", body];
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: +settings.top });
  const tools = parsed("tools");
  if (tools) Object.assign(body, { tools, tool_choice: settings.choice });
  if (settings.form === "json_object") body.response_format = { type: "json_object" };
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  body.messages = messagesOf(from ? [...nodes, { role: "assistant", text: from.text }] : nodes);
  if (from) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return ["v1/chat/completions", body];
}

function curl() {
  const nodes = path();
  while (nodes.at(-1)?.role === "assistant") nodes.pop();
  const [place, body] = requestFor(nodes);
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = apiKey ? ' \\\n  -H "Authorization: Bearer $ESURGE_API_KEY"' : "";
  return `curl ${new URL(place, location.href)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}
