// Elements of the conversation: questions, answers with thoughts and calls, and their buttons.
import { answer, isIdle } from "./answering.js";
import { callOf, resultsOf } from "./calls.js";
import { save } from "./conversations.js";
import { copy } from "./copying.js";
import { el, iconButton } from "./dom.js";
import { edit, editor } from "./editing.js";
import { emit } from "./events.js";
import { failureOf } from "./failure.js";
import { heatMap, view } from "./heat.js";
import { prose } from "./markdown/markdown.js";
import { chats } from "./models.js";
import { nodeOf, open, show, siblings } from "./tree.js";

const drawn = new WeakSet();

export function keyOf(node) {
  return [open.id, node.id, node.text.length, node.thoughts?.length, node.calls?.length, node.running, node.error?.message, node.figures,
    node.editing, view.heated, siblings(node).length, siblings(node).indexOf(node.id), nodeOf(node.parent).pick, node.kids.length > 0, chats()].join("|");
}

/** Return the other answer of a comparison, or undefined. */
export const pairOf = (node) => (node.pair === undefined ? undefined : nodeOf(node.pair));

export function turnOf(node) {
  // A turn is animated once. A growing turn is created again for each frame.
  const turn = el("article", { className: `turn ${node.role}${drawn.has(node) ? "" : " fresh"}` });
  drawn.add(node);
  const pair = pairOf(node);
  if (pair) {
    const both = [node, pair].sort((one, other) => one.id - other.id);
    turn.classList.add("compared");
    turn.append(...both.map((one) => el("div", { className: `side${one === node ? " picked" : ""}` }, inside(one), choice(one, one === node))));
  } else turn.append(...inside(node));
  return turn;
}

function inside(node) {
  if (node.editing) return [editor(node)];
  if (node.role === "user") return [el("div", { className: "sr" }, "You"), imagesOf(node), el("div", { className: "said" }, node.text), actions(node)];
  if (node.role === "tool") return [el("div", { className: "who" }, `Result of ${node.name}`), el("div", { className: "said" }, node.text)];
  return answerOf(node);
}

function imagesOf(node) {
  return el("div", { className: "images" }, (node.images ?? []).map((src, place) => el("img", { src, alt: `Image ${place + 1}` })));
}

/** Return the button that continues the conversation with one of two compared answers. */
function choice(node, picked) {
  return el("button", { type: "button", className: "choose", "aria-pressed": String(picked), onclick: () => { show(node); save(); emit("tree"); } },
    picked ? "The conversation continues with this answer" : "Continue with this answer");
}

function answerOf(node) {
  const parts = [el("div", { className: "who" }, [node.model ?? "Assistant", node.label, node.edited && "edited", node.stopped && "stopped"].filter(Boolean).join(" · "))];
  if (node.thoughts) {
    parts.push(el("details", { className: "thoughts", open: node.running && !node.text },
      el("summary", {}, node.running && !node.text ? "Thinking" : "Thoughts"), el("div", {}, node.thoughts)));
  }
  parts.push(view.heated && node.tokens?.length ? heatMap(node, chats()) : textOf(node));
  for (const call of node.calls ?? []) parts.push(callOf(call));
  if (node.error) parts.push(failureOf(node));
  if (!node.running && node.calls?.length && !node.kids.length) parts.push(resultsOf(node));
  if (!node.running) parts.push(actions(node));
  return parts;
}

function textOf(node) {
  const said = el("div", { className: "said prose" }, chats() ? prose(node.text) : el("p", { className: "tokens" }, node.text));
  if (node.running) ((said.lastElementChild?.matches("p, ul, ol, h3, h4, h5, h6") && said.lastElementChild) || said).classList.add("caret");
  return said;
}

function actions(node) {
  const bar = el("div", { className: "tools" });
  const all = siblings(node), place = all.indexOf(node.id);
  if (all.length > 1 && !pairOf(node)) {
    const go = (to) => () => { nodeOf(node.parent).pick = to; save(); emit("tree"); };
    bar.append(el("span", { className: "branch" },
      iconButton("left", "Previous version", go(place - 1), { disabled: place === 0 }),
      el("span", { "aria-label": `Version ${place + 1} of ${all.length}` }, `${place + 1} / ${all.length}`),
      iconButton("right", "Next version", go(place + 1), { disabled: place === all.length - 1 })));
  }
  if (node.role === "assistant") {
    bar.append(iconButton("again", "Regenerate", () => isIdle() && answer(node.parent)));
    if (node.finish === "length" || node.stopped) {
      bar.append(el("button", { type: "button", className: "text", "aria-label": "Continue", onclick: () => answer(node.parent, node) }, "Continue"));
    }
  }
  bar.append(iconButton("edit", "Edit", () => edit(node)));
  bar.append(iconButton("copy", "Copy", (event) => copy(node.text, event.currentTarget)));
  if (node.figures) bar.append(el("span", { className: "figures" }, node.figures));
  return bar;
}
