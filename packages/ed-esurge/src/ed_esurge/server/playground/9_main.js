// Requests of the conversation: one at a time, streamed into the tree; keyboard shortcuts.
let running = null;

/** Answer the branch that ends at a node. `from`: text and tokens of an answer to continue. */
async function answer(parent, from) {
  if (running) return;
  const nodes = path(parent);
  const cut = new AbortController();
  const first = addNode(parent, { role: "assistant", running: true, text: from?.text ?? "", tokens: [...(from?.tokens ?? [])], model: $("model").value });
  const known = { 0: first };
  running = cut;
  working(true);
  show(first);
  drawSoon();
  const began = performance.now();
  let arrived = null, usage = null, ended = null;
  try {
    const [place, body] = requestFor(nodes, from);
    for await (const chunk of streamed(place, body, cut.signal)) {
      arrived ??= performance.now();
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        const node = (known[choice.index] ??= besides(first));
        take(node, choice);
      }
      drawSoon();
    }
  } catch (error) {
    ended = error;
  }
  for (const node of Object.values(known)) {
    node.running = false;
    if (ended?.name === "AbortError") node.stopped = true;
    else if (ended) node.error = { message: ended instanceof Refused || ended instanceof Error ? ended.message : String(ended), code: ended.code ?? null };
  }
  first.figures = figures(began, arrived, usage, Object.keys(known).length);
  running = null;
  working(false);
  saveTree();
  drawSoon();
  speak(ended?.name === "AbortError" ? "Stopped" : ended ? "The answer failed" : "The answer is complete");
}

/** Add another answer of the same request as a branch. The first answer remains visible. */
function besides(first) {
  const node = addNode(first.parent, { role: "assistant", running: true, tokens: [], model: first.model });
  show(first);
  return node;
}

function take(node, choice) {
  const delta = choice.delta ?? { content: choice.text };
  node.text += delta.content ?? "";
  if (delta.reasoning_content) node.thoughts = (node.thoughts ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const call = (node.calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" });
    call.arguments += part.function.arguments ?? "";
  }
  node.tokens.push(...tokensOf(choice.logprobs));
  node.finish = choice.finish_reason ?? node.finish;
}

function figures(began, arrived, usage, choices) {
  if (arrived === null) return "";
  const parts = [];
  const now = performance.now();
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const speed = usage.completion_tokens / Math.max((now - began) / 1000, 1e-3);
    parts.push(`${usage.completion_tokens} tokens${choices > 1 ? ` in ${choices} answers` : ""}`, `${speed.toFixed(speed < 10 ? 1 : 0)}/s`);
    parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  parts.push(`first after ${(arrived - began).toFixed(0)} ms`);
  return parts.join(" · ");
}

function working(yes) {
  const button = $("send");
  button.toggleAttribute("data-stop", yes);
  button.setAttribute("aria-label", yes ? "Stop" : "Send");
  button.replaceChildren(icon(yes ? "stop" : "send"));
  $("log").setAttribute("aria-busy", String(yes));
}

function send(text) {
  if (running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  const question = addNode(tip(), { role: "user", text });
  $("log").scrollTop = $("log").scrollHeight;
  answer(question.id).catch((error) => speak(error.message));
}

function grow() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send($("prompt").value);
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) send($("prompt").value);
  }
});

function applyHeat() {
  $("heat").setAttribute("aria-pressed", String(heated));
}

$("heat").addEventListener("click", () => {
  heated = !heated;
  keep(TAB, "heat", heated);
  applyHeat();
  draw();
});
$("new").addEventListener("click", () => {
  running?.abort();
  tree = EMPTY();
  saveTree();
  draw();
  $("prompt").focus();
});

// ---- drawers on screens that are too narrow for three columns

function drawer(id, open) {
  for (const name of ["engine", "settings"]) {
    const yes = open && name === id;
    $(name).classList.toggle("open", yes);
    $(`open-${name}`).setAttribute("aria-expanded", String(yes));
  }
  $("scrim").hidden = !open;
  if (open) $(id).querySelector(".close").focus();
  else if (id) $(`open-${id}`).focus();
}

for (const name of ["engine", "settings"]) {
  $(`open-${name}`).addEventListener("click", () => drawer(name, true));
  $(name).querySelector(".close").addEventListener("click", () => drawer(name, false));
}
$("scrim").addEventListener("click", () => drawer(null, false));

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "Escape") {
    if (opener) closeAlternatives(true);
    else if (!$("scrim").hidden) drawer($("settings").classList.contains("open") ? "settings" : "engine", false);
    else running?.abort();
  } else if (event.key === "/" && !typing) {
    event.preventDefault();
    $("prompt").focus();
  }
});

// ---- start

for (const node of Object.values(tree.nodes)) node.tokens ??= [];
whenKey = () => loadModels().then(draw, () => {});
buildSettings();
applyHeat();
draw();
buildEngine();
whenKey();
$("prompt").focus();
