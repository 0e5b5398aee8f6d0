// The probability view: the answer as Markdown, with each token colored by its probability.
import { focusAlternatives, openAlternatives } from "./alternatives.js";
import { el } from "./dom.js";
import { prose } from "./markdown/markdown.js";
import { TAB, recall } from "./storage.js";
import { isMark, percent, shownTexts, visible } from "./tokens.js";

export const view = { heated: recall(TAB, "heat", false) };

/** Return the element of an answer. `markdown`: draw the tokens inside of Markdown. */
export function heatMap(node, markdown) {
  const texts = shownTexts(node.tokens);
  const begin = markdown ? texts.join("").indexOf(node.text) : -1;
  const box = el("div", { className: `said ${begin < 0 ? "tokens" : "prose heated"}`, role: "group", "aria-label": "Tokens with their probabilities" });
  if (begin < 0) node.tokens.forEach((_, place) => box.append(span(node, texts, place)));
  else drawInside(box, node, texts, begin);
  const first = box.querySelector(".tok[role]");
  if (first) first.tabIndex = 0;
  const over = (event) => {
    const token = event.target.closest(".tok");
    if (token) openAlternatives(node, token);
  };
  box.addEventListener("mouseover", over);
  box.addEventListener("focusin", over);
  box.addEventListener("click", over);
  box.addEventListener("keydown", (event) => walk(event, box));
  return el("div", {}, box, legend(node));
}

/** Return the element of a token. `part`: the characters of the token that this element shows. */
function span(node, texts, place, part = null) {
  const { logprob } = node.tokens[place];
  const text = texts[place];
  const label = text === "" ? "…" : text;
  if (logprob === null) return el("span", { className: "tok plain" }, part ?? label);
  const marked = text === "" || isMark(text);
  const one = el("span", {
    className: `tok${marked ? " mark-only" : ""}`, role: "button", tabIndex: -1, "aria-haspopup": "dialog", "aria-expanded": "false",
    "aria-label": `${visible(label)}, ${percent(logprob)}`,
  }, part ?? label);
  one.style.setProperty("--l", Math.min(1, -logprob / 4).toFixed(3));
  one.place = place;
  return one;
}

/** Draw Markdown whose characters have the elements of their tokens. */
function drawInside(box, node, texts, begin) {
  const owners = []; // the token of each character of the answer
  texts.forEach((text, place) => { for (let one = 0; one < text.length; one += 1) owners.push(place); });
  const shown = new Map();
  const leaf = (source) => {
    const nodes = [];
    for (let at = 0; at < source.length;) {
      const place = owners[begin + source.places[at]];
      let end = at + 1;
      while (end < source.length && owners[begin + source.places[end]] === place) end += 1;
      const part = span(node, texts, place, source.text.slice(at, end));
      if (shown.has(place)) {
        // A further element of the same token is not another stop of the keyboard.
        part.removeAttribute("role");
        part.classList.add("further");
      } else shown.set(place, part);
      nodes.push(part);
      at = end;
    }
    return nodes;
  };
  box.append(...prose(node.text, leaf));
  // Tokens without a visible character, such as marks of Markdown, precede the next token.
  let next = null;
  for (let place = node.tokens.length - 1; place >= 0; place -= 1) {
    const own = shown.get(place);
    if (own) { next = own; continue; }
    const label = visible(texts[place]) || "…";
    const mark = span(node, texts, place, label);
    mark.classList.add("mark-only");
    if (next) next.before(mark);
    else last(box, shown).append(mark);
    next = mark;
  }
}

/** Return the element that contains the last visible token. */
function last(box, shown) {
  const all = [...shown.values()];
  return all.length ? all.reduce((one, other) => (one.place > other.place ? one : other)).parentElement : box;
}

function walk(event, box) {
  const token = event.target;
  if (!token.matches(".tok")) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) {
    const stops = [...box.querySelectorAll(".tok[role]")].sort((one, other) => one.place - other.place);
    const next = stops[stops.indexOf(token) + step];
    if (next) {
      token.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    event.preventDefault();
  } else if (event.key === "Enter" || event.key === "ArrowDown") {
    focusAlternatives();
    event.preventDefault();
  }
}

function legend(node) {
  const scores = node.tokens.map((one) => one.logprob).filter((score) => score !== null);
  const mean = scores.reduce((sum, score) => sum + score, 0) / Math.max(scores.length, 1);
  return el("div", { className: "legend" }, "expected", el("i", { "aria-hidden": "true" }), "surprising",
    el("span", {}, `· perplexity ${Math.exp(-mean).toFixed(2)} over ${scores.length} tokens`));
}
