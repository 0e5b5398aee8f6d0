// Requests to the server: models, answers as streams of events, and the API key.
let apiKey = recall(TAB, "key", "");

class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

async function ask(path, body, signal) {
  const headers = {};
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    if (answer.status === 401) askForKey(apiKey ? said.error?.message : "");
    throw new Refused(answer.status, said.error);
  }
  return answer;
}

/** Yield the chunks of a stream as objects. */
async function* streamed(path, body, signal) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error);
      yield chunk;
    }
  }
}

let whenKey = () => {};

function askForKey(error = "") {
  if ($("key-dialog").open) return;
  $("key-value").value = apiKey;
  $("key-error").textContent = error ?? "";
  $("key-dialog").showModal();
}

function useKey(value) {
  apiKey = value.trim();
  keep(TAB, "key", apiKey);
  $("key-dialog").close();
  whenKey();
}

$("key").addEventListener("click", () => askForKey());
$("key-use").addEventListener("click", () => useKey($("key-value").value));
$("key-forget").addEventListener("click", () => useKey(""));
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-value").addEventListener("keydown", (event) => {
  if (event.key === "Enter") useKey($("key-value").value);
});

// ---- models

let cards = [];
const card = () => cards.find((one) => one.id === $("model").value) ?? cards[0];

async function loadModels() {
  cards = (await (await ask("v1/models")).json()).data;
  const wanted = $("model").value || recall(TAB, "model", "");
  $("model").replaceChildren(...cards.map((one) =>
    el("option", { value: one.id }, one.parent ? `${one.id} (on ${one.parent})` : one.id)));
  if (cards.some((one) => one.id === wanted)) $("model").value = wanted;
  await choose();
}

/** Return whether the model accepts conversations. A model without a chat template continues texts. */
let speaks = true;

async function choose() {
  keep(TAB, "model", $("model").value);
  try {
    await ask("tokenize", { model: $("model").value, messages: [{ role: "user", content: "" }] });
    speaks = true;
  } catch (error) {
    speaks = error.code !== "no_chat_template";
  }
  $("mode-hint").textContent = chats() ? "" : "This model continues a text.";
  $("prompt").placeholder = chats() ? "Send a message" : "Write the beginning of a text";
}

$("model").addEventListener("change", () => choose().then(draw));
