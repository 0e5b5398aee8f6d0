// The alternatives of a token: a list from which another token can be chosen.
import { answer } from "./answering.js";
import { $, el } from "./dom.js";
import { bytesOf, isMark, percent, shownTexts, visible } from "./tokens.js";

export const popover = { opener: null };

export function openAlternatives(node, token) {
  if (token.place === undefined || popover.opener === token) return;
  closeAlternatives();
  popover.opener = token;
  token.setAttribute("aria-expanded", "true");
  const { token: own, logprob, top } = node.tokens[token.place];
  const all = top.some(([text]) => text === own) ? top : [[own, logprob], ...top];
  const branches = !node.running && !node.calls?.length && !node.thoughts;
  const rows = all.map(([text, score]) => {
    const can = branches && text !== own && !text.startsWith("bytes:") && !isMark(text);
    const button = el("button", {
      type: "button", disabled: !can, className: text === own ? "chosen" : "", onclick: () => branchAt(node, token.place, text, score),
      "aria-label": `${visible(text)}, ${percent(score)}${can ? ": go on from here" : ""}`,
    }, el("code", {}, visible(text)), el("span", { className: "percent" }, percent(score)));
    button.style.setProperty("--p", Math.exp(score).toFixed(4));
    return button;
  });
  const note = branches ? "Choose another token to continue from there in a new version." : "";
  const box = $("popover");
  box.replaceChildren(el("h3", {}, `Token ${token.place + 1} of ${node.tokens.length}`), ...rows, ...(note ? [el("p", {}, note)] : []));
  box.hidden = false;
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - box.offsetWidth - 8);
  const below = at.bottom + 3 + box.offsetHeight < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? at.bottom + 3 : Math.max(8, at.top - box.offsetHeight - 3)}px`;
}

export function closeAlternatives(refocus = false) {
  if (!popover.opener) return;
  popover.opener.setAttribute("aria-expanded", "false");
  if (refocus) popover.opener.focus();
  popover.opener = null;
  $("popover").hidden = true;
}

export function focusAlternatives() {
  $("popover").querySelector("button:not(:disabled)")?.focus();
}

/** Create a branch with the tokens before a position, and continue after another token. */
function branchAt(node, place, text, logprob) {
  closeAlternatives();
  const before = node.tokens.slice(0, place);
  const chosen = { ...node.tokens[place], token: text, logprob, bytes: bytesOf(text) };
  const tokens = [...before, chosen];
  answer(node.parent, { text: shownTexts(tokens).join(""), tokens });
}

export function buildAlternatives() {
  document.addEventListener("mouseover", (event) => {
    const inside = event.target.closest?.(".tok, .popover");
    if (!inside && !$("popover").contains(document.activeElement) && popover.opener !== document.activeElement) closeAlternatives();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest?.(".tok, .popover")) closeAlternatives();
  });
  $("log").addEventListener("scroll", () => closeAlternatives());
  $("popover").addEventListener("keydown", (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!step) return;
    for (let next = event.target[step]; next; next = next[step]) {
      if (next.matches("button:not(:disabled)")) { next.focus(); break; }
    }
    event.preventDefault();
  });
}
