// The heat map: tokens colored by their probabilities, and their alternatives.
let heated = recall(TAB, "heat", false);

/** Return the tokens of a chunk of either endpoint: {token, logprob, bytes, top: [[token, logprob], …]}. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      token: one.token, logprob: one.logprob, bytes: one.bytes,
      top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((token, place) => ({
    token, logprob: logprobs.token_logprobs[place], bytes: bytesOf(token),
    top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

function bytesOf(token) {
  if (!token.startsWith("bytes:")) return [...new TextEncoder().encode(token)];
  return [...token.matchAll(/\\x([0-9a-f]{2})/g)].map((found) => parseInt(found[1], 16));
}

/** Return the texts of tokens. The last of several tokens of one character has the character. */
function shownTexts(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((one) => decoder.decode(new Uint8Array(one.bytes), { stream: true }));
}

const isMark = (text) => /^<[^\s<>]{1,40}>$/.test(text);
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

function heatMap(node) {
  const texts = shownTexts(node.tokens);
  const box = el("div", { className: "said tokens", role: "group", "aria-label": "Tokens with their probabilities" });
  node.tokens.forEach((one, place) => {
    const text = texts[place];
    const label = text === "" ? "…" : text;
    if (one.logprob === null) {
      box.append(el("span", { className: "tok plain" }, label));
      return;
    }
    const span = el("span", {
      className: `tok${text === "" || isMark(text) ? " mark-only" : ""}`, role: "button", tabIndex: place ? -1 : 0,
      "aria-haspopup": "dialog", "aria-expanded": "false", "aria-label": `${visible(label)}, ${percent(one.logprob)}`,
    }, label);
    span.style.setProperty("--l", Math.min(1, -one.logprob / 4).toFixed(3));
    span.place = place;
    box.append(span);
  });
  box.addEventListener("mouseover", (event) => event.target.closest(".tok") && openAlternatives(node, event.target));
  box.addEventListener("focusin", (event) => event.target.matches(".tok") && openAlternatives(node, event.target));
  box.addEventListener("click", (event) => event.target.matches(".tok") && openAlternatives(node, event.target));
  box.addEventListener("keydown", (event) => walk(event));
  return el("div", {}, box, legend(node));
}

function walk(event) {
  const token = event.target;
  if (!token.matches(".tok")) return;
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (step) {
    const next = token[step];
    if (next?.matches(".tok")) {
      token.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    event.preventDefault();
  } else if (event.key === "Enter" || event.key === "ArrowDown") {
    $("popover").querySelector("button:not(:disabled)")?.focus();
    event.preventDefault();
  }
}

function legend(node) {
  const scores = node.tokens.map((one) => one.logprob).filter((score) => score !== null);
  const mean = scores.reduce((sum, score) => sum + score, 0) / Math.max(scores.length, 1);
  return el("div", { className: "legend" }, "expected", el("i", { "aria-hidden": "true" }), "surprising",
    el("span", {}, `· perplexity ${Math.exp(-mean).toFixed(2)} over ${scores.length} tokens`));
}

let opener = null;

function openAlternatives(node, token) {
  if (token.place === undefined || opener === token) return;
  closeAlternatives();
  opener = token;
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

function closeAlternatives(refocus = false) {
  if (!opener) return;
  opener.setAttribute("aria-expanded", "false");
  if (refocus) opener.focus();
  opener = null;
  $("popover").hidden = true;
}

document.addEventListener("mouseover", (event) => {
  const inside = event.target.closest?.(".tok, .popover");
  if (!inside && !$("popover").contains(document.activeElement) && opener !== document.activeElement) closeAlternatives();
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

/** Create a branch with the tokens before a position, and continue after another token. */
function branchAt(node, place, text, logprob) {
  closeAlternatives();
  const before = node.tokens.slice(0, place);
  const chosen = { ...node.tokens[place], token: text, logprob, bytes: bytesOf(text) };
  const tokens = [...before, chosen];
  answer(node.parent, { text: shownTexts(tokens).join(""), tokens });
}
