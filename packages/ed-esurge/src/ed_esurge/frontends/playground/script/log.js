// The visible conversation. Unchanged turns keep their elements, their scroll position and focus.
import { closeAlternatives } from "./alternatives.js";
import { $, el, icon } from "./dom.js";
import { emit, on } from "./events.js";
import { view } from "./heat.js";
import { chats } from "./models.js";
import { TAB, keep } from "./storage.js";
import { path } from "./tree.js";
import { keyOf, pairOf, turnOf } from "./turns.js";

const STARTERS = [
  "Explain to a child why the sky is blue.",
  "Write a Python function that reverses the words of a sentence.",
  "List three rivers of Europe with their lengths, in a few words each.",
];
const OPENINGS = ["The sky is blue because", "def reverse_words(sentence):", "Once upon a time, in a small town by the sea,"];
const NEAR = 90; // pixels from the end within which the view follows a growing answer
let waiting = false;

function draw() {
  const nodes = path();
  closeAlternatives();
  if (!nodes.length) {
    $("log").replaceChildren(welcome());
    return;
  }
  const old = new Map([...$("log").children].map((turn) => [turn.key, turn]));
  $("log").replaceChildren(...nodes.map((node) => {
    const pair = pairOf(node);
    const key = keyOf(node) + (pair ? keyOf(pair) : "");
    const turn = old.get(key) ?? turnOf(node);
    turn.key = key;
    return turn;
  }));
}

function welcome() {
  const texts = chats() ? STARTERS : OPENINGS;
  return el("div", { className: "empty" },
    el("h2", {}, chats() ? "What would you like to know?" : "Which text should the model continue?"),
    el("p", {}, "The model runs on this server. Click a token of an answer to see its alternatives, and choose one to continue from there."),
    el("div", { className: "starters" }, texts.map((text) => el("button", { type: "button", onclick: () => emit("send", text) }, text, icon("more")))));
}

/** Draw at most once per frame. Keep the view at the end if the user has scrolled there. */
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    draw();
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

function applyHeat() {
  $("heat").setAttribute("aria-pressed", String(view.heated));
}

export function buildLog() {
  on("tree", drawSoon);
  on("model", draw);
  on("opened", () => { draw(); $("log").scrollTop = $("log").scrollHeight; });
  $("heat").addEventListener("click", () => {
    view.heated = !view.heated;
    keep(TAB, "heat", view.heated);
    applyHeat();
    draw();
  });
  applyHeat();
  draw();
}
