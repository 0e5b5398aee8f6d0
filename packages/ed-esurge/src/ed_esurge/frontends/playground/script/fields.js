// Input fields of settings. A field writes its setting, and shows the setting after other changes.
import { el } from "./dom.js";
import { change, settings } from "./settings.js";

const shown = {}; // name -> function that shows the value of a setting in its field

export function showSettings() {
  for (const update of Object.values(shown)) update();
}

export function slider(name, label, min, max, step) {
  const id = `set-${name}`;
  const range = el("input", { type: "range", min, max, step, id, "aria-label": label });
  const number = el("input", { type: "number", min, max, step, id: `${id}-number` });
  const both = (source) => () => {
    if (source.value === "" || !Number.isFinite(+source.value)) return;
    (source === range ? number : range).value = source.value;
    change({ [name]: +source.value });
  };
  range.addEventListener("input", both(range));
  number.addEventListener("input", both(number));
  shown[name] = () => { range.value = number.value = settings[name]; };
  return el("div", { className: "field" }, el("div", { className: "top" }, el("label", { htmlFor: number.id }, label), number), range);
}

export function field(name, label, props = {}, note = "") {
  const id = `set-${name}`;
  const area = props.rows !== undefined;
  const input = el(area ? "textarea" : "input", { id, ...props, type: area ? undefined : props.type ?? "text" });
  input.addEventListener("input", () => {
    const numeric = props.type === "number" && input.value !== "";
    change({ [name]: numeric ? +input.value : input.value });
  });
  shown[name] = () => { input.value = settings[name]; };
  return el("div", { className: "field" }, el("label", { htmlFor: id }, label), input, note && el("p", { className: "note" }, note));
}

export function select(name, label, options) {
  const id = `set-${name}`;
  const input = el("select", { id }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  input.addEventListener("change", () => change({ [name]: input.value }));
  shown[name] = () => { input.value = settings[name]; };
  return el("div", { className: "field" }, el("label", { htmlFor: id }, label), input);
}

export function checkbox(name, label) {
  const input = el("input", { type: "checkbox", id: `set-${name}`, onchange: () => change({ [name]: input.checked }) });
  shown[name] = () => { input.checked = settings[name]; };
  return el("label", { className: "check" }, input, label);
}

export function group(id, title, open, ...inner) {
  return el("details", { className: "group", id: `group-${id}`, open },
    el("summary", {}, title, el("span", { className: "set" })), el("div", { className: "inner" }, inner));
}
