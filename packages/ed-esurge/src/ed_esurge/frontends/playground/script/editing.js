// Editing of messages. An edited message is another version, and the old version remains.
import { answer } from "./answering.js";
import { save } from "./conversations.js";
import { el, textButton } from "./dom.js";
import { emit } from "./events.js";
import { addNode } from "./tree.js";

export function edit(node) {
  node.editing = true;
  emit("tree");
}

/** Return the editor of a message. An edited question is answered; an edited answer is kept as is. */
export function editor(node) {
  const question = node.role === "user";
  const area = el("textarea", { value: node.text, "aria-label": question ? "Your message" : "The answer" });
  const close = () => { delete node.editing; emit("tree"); };
  const keepVersion = () => {
    delete node.editing;
    if (question) return answer(addNode(node.parent, { role: "user", text: area.value, images: node.images }).id);
    addNode(node.parent, { role: "assistant", text: area.value, tokens: [], model: node.model, label: node.label, edited: true });
    emit("tree");
    return save();
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { close(); event.stopPropagation(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keepVersion();
  });
  requestAnimationFrame(() => area.focus());
  return el("div", { className: "edit" }, area, el("div", { className: "row end" }, textButton("Cancel", close),
    el("button", { type: "button", className: "solid", onclick: keepVersion }, question ? "Send as a new version" : "Keep as a new version")));
}
