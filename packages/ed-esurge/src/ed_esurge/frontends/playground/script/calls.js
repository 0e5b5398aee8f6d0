// Calls of functions in an answer, and the inputs for their results.
import { answer } from "./answering.js";
import { el } from "./dom.js";
import { addNode } from "./tree.js";

export function callOf(call) {
  let shown = call.arguments;
  try { shown = JSON.stringify(JSON.parse(call.arguments), null, 2); } catch { /* incomplete JSON */ }
  return el("div", { className: "call" }, el("b", {}, call.name), el("pre", {}, shown));
}

/** Return the inputs for the results of calls. The model continues with these results. */
export function resultsOf(node) {
  const inputs = node.calls.map((call, place) => el("textarea", {
    "aria-label": `Result of ${call.name}`, id: `result-${node.id}-${place}`, placeholder: `Result of ${call.name}`, rows: 1, spellcheck: false,
  }));
  const give = el("button", { type: "button", className: "solid", onclick: () => {
    let last = node.id;
    node.calls.forEach((call, place) => {
      last = addNode(last, { role: "tool", text: inputs[place].value, call: call.id, name: call.name }).id;
    });
    answer(last);
  } }, inputs.length > 1 ? "Send the results" : "Send the result");
  return el("div", { className: "call" }, inputs, el("div", { className: "row end" }, give));
}
