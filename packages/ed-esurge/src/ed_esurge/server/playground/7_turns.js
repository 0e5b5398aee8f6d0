// Elements of the conversation: questions, answers with thoughts and calls, and their buttons.
function draw() {
  const nodes = path();
  closeAlternatives();
  if (!nodes.length) {
    $("log").replaceChildren(welcome());
    return;
  }
  const old = new Map([...$("log").children].map((turn) => [turn.key, turn]));
  // Unchanged turns keep their elements, so that the scroll position and the focus are kept.
  const turns = nodes.map((node) => {
    const key = keyOf(node);
    return old.get(key) ?? turnOf(node, key);
  });
  $("log").replaceChildren(...turns);
}

function keyOf(node) {
  return [node.id, node.text.length, node.thoughts?.length, node.calls?.length, node.running, node.error?.message,
    node.editing, heated, siblings(node).length, node.kids.length > 0].join("|");
}

const STARTERS = [
  "Explain to a child why the sky is blue.",
  "Write a Python function that reverses the words of a sentence.",
  "List three rivers of Europe with their lengths, in a few words each.",
];
const OPENINGS = ["The sky is blue because", "def reverse_words(sentence):", "Once upon a time, in a small town by the sea,"];

function welcome() {
  const texts = chats() ? STARTERS : OPENINGS;
  return el("div", { className: "empty" },
    el("h2", {}, chats() ? "What would you like to know?" : "Which text should the model continue?"),
    el("p", {}, "The model runs on this server. Click a token of an answer to see its alternatives, and choose one to continue from there."),
    el("div", { className: "starters" }, texts.map((text) => el("button", { type: "button", onclick: () => send(text) }, text, icon("more")))));
}

const drawn = new Set();

function turnOf(node, key) {
  // A turn is animated once. A growing turn is created again for each frame.
  const turn = el("article", { className: `turn ${node.role}${drawn.has(node.id) ? "" : " fresh"}` });
  drawn.add(node.id);
  turn.key = key;
  if (node.editing) turn.append(editor(node));
  else if (node.role === "user") turn.append(el("div", { className: "sr" }, "You"), el("div", { className: "said" }, node.text), actions(node));
  else if (node.role === "tool") turn.append(el("div", { className: "who" }, `Result of ${node.name}`), el("div", { className: "said" }, node.text));
  else turn.append(...answerOf(node));
  return turn;
}

function answerOf(node) {
  const parts = [el("div", { className: "who" }, node.model ?? "Assistant")];
  if (node.thoughts) {
    parts.push(el("details", { className: "thoughts", open: node.running && !node.text },
      el("summary", {}, node.running && !node.text ? "Thinking" : "Thoughts"), el("div", {}, node.thoughts)));
  }
  if (heated && node.tokens?.length) parts.push(heatMap(node));
  else {
    const said = el("div", { className: "said prose" }, chats() ? prose(node.text) : el("p", { className: "tokens" }, node.text));
    if (node.running) ((said.lastElementChild?.matches("p, ul, ol, h3") && said.lastElementChild) || said).classList.add("caret");
    parts.push(said);
  }
  for (const call of node.calls ?? []) parts.push(callOf(call));
  if (node.error) {
    parts.push(el("div", { className: "failed", role: "alert" }, node.error.message, node.error.code ? el("div", {}, el("code", {}, node.error.code)) : null));
  }
  if (!node.running && node.calls?.length && !node.kids.length) parts.push(results(node));
  if (!node.running) parts.push(actions(node));
  return parts;
}

function callOf(call) {
  let shown = call.arguments;
  try { shown = JSON.stringify(JSON.parse(call.arguments), null, 2); } catch { /* incomplete JSON */ }
  return el("div", { className: "call" }, el("b", {}, call.name), el("pre", {}, shown));
}

/** Return the inputs for the results of calls. The model continues with these results. */
function results(node) {
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

function actions(node) {
  const bar = el("div", { className: "tools" });
  const all = siblings(node), place = all.indexOf(node.id);
  if (all.length > 1) {
    const go = (to) => () => { tree.nodes[node.parent].pick = to; saveTree(); draw(); };
    bar.append(el("span", { className: "branch" },
      iconButton("left", "Previous version", go(place - 1), { disabled: place === 0 }),
      el("span", { "aria-label": `Version ${place + 1} of ${all.length}` }, `${place + 1} / ${all.length}`),
      iconButton("right", "Next version", go(place + 1), { disabled: place === all.length - 1 })));
  }
  if (node.role === "assistant") {
    bar.append(iconButton("again", "Regenerate", () => answer(node.parent)));
    if (node.finish === "length" || node.stopped) bar.append(iconButton("more", "Continue", () => answer(node.parent, node)));
  } else bar.append(iconButton("edit", "Edit", () => { node.editing = true; draw(); }));
  bar.append(iconButton("copy", "Copy", (event) => copy(node.text, event.currentTarget)));
  if (node.figures) bar.append(el("span", { className: "figures" }, node.figures));
  return bar;
}

function editor(node) {
  const area = el("textarea", { value: node.text, "aria-label": "Your message" });
  const close = () => { delete node.editing; draw(); };
  const save = () => {
    delete node.editing;
    const other = addNode(node.parent, { role: "user", text: area.value });
    answer(other.id);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { close(); event.stopPropagation(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
  });
  requestAnimationFrame(() => area.focus());
  return el("div", { className: "edit" }, area, el("div", { className: "row end" },
    el("button", { type: "button", className: "text", onclick: close }, "Cancel"),
    el("button", { type: "button", className: "solid", onclick: save }, "Send as a new version")));
}

let drawing = false;

/** Draw at most once per frame. Keep the view at the end if the user has scrolled there. */
function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 90;
    draw();
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}
