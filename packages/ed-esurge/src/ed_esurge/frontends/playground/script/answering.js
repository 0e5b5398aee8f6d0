// Requests of the conversation, streamed into the tree. One question is answered at a time.
import { speak } from "./dom.js";
import { emit } from "./events.js";
import { chosen } from "./models.js";
import { requestFor } from "./request.js";
import { Refused, streamed } from "./server.js";
import { settings } from "./settings.js";
import { save } from "./conversations.js";
import { addNode, dropNode, nodeOf, path, show, siblings } from "./tree.js";
import { tokensOf } from "./tokens.js";

const SAVED_EVERY = 2000; // milliseconds between two copies of a growing answer
export const work = { cut: null, saved: 0 };

export const isIdle = () => work.cut === null;
export const stop = () => work.cut?.abort();

/** Answer the branch that ends at a node. `from`: text and tokens of an answer to continue. */
export async function answer(parent, from) {
  await busy((cut) => produce(parent, from, { model: chosen(), values: settings }, cut));
}

/** Answer a question twice, with two variants: {model, values, label}. */
export async function answerTwice(parent, variants) {
  await busy((cut) => {
    const nodes = variants.map((variant) => begun(parent, undefined, variant));
    nodes.forEach((node, place) => { node.pair = nodes[1 - place].id; });
    show(nodes[0]);
    return Promise.all(nodes.map((node, place) => fill(node, undefined, variants[place], cut)));
  });
}

/** Answer again: a failed answer without text is replaced, another answer remains as a version. */
export function retry(node) {
  const parent = node.parent;
  if (!isIdle()) return;
  if (!node.text && !node.kids.length && node.pair === undefined) dropNode(node);
  answer(parent);
}

async function busy(start) {
  if (!isIdle()) return;
  const cut = new AbortController();
  work.cut = cut;
  emit("working", true);
  const results = [await start(cut)].flat();
  work.cut = null;
  emit("working", false);
  await save();
  emit("tree");
  const failed = results.find((error) => error && error.name !== "AbortError");
  speak(failed ? "The answer failed" : results.some(Boolean) ? "Stopped" : "The answer is complete");
}

function begun(parent, from, { model, label }) {
  const node = addNode(parent, { role: "assistant", running: true, text: from?.text ?? "", tokens: [...(from?.tokens ?? [])], model });
  if (label) node.label = label;
  return node;
}

function produce(parent, from, variant, cut) {
  const node = begun(parent, from, variant);
  show(node);
  return fill(node, from, variant, cut);
}

/** Stream into a node, and return the error that ended the stream, or null. */
async function fill(first, from, variant, cut) {
  const known = { 0: first };
  const times = { began: performance.now(), arrived: null };
  let usage = null, ended = null;
  emit("tree");
  try {
    const [place, body] = requestFor(path(first.parent), from, variant);
    for await (const chunk of streamed(place, body, cut.signal)) {
      times.arrived ??= performance.now();
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) take((known[choice.index] ??= besides(first)), choice);
      emit("tree");
      if (performance.now() - work.saved > SAVED_EVERY) {
        work.saved = performance.now();
        save();
      }
    }
  } catch (error) {
    ended = error;
  }
  for (const node of Object.values(known)) {
    delete node.running;
    if (ended?.name === "AbortError") node.stopped = true;
    else if (ended) node.error = problem(ended);
  }
  first.figures = figures(times, usage, Object.keys(known).length);
  return ended;
}

function problem(error) {
  if (error instanceof Refused) return { message: error.message, code: error.code, status: error.status };
  return { message: error instanceof TypeError ? `The connection to the server failed: ${error.message}` : error.message, code: error instanceof TypeError ? "connection" : null };
}

/** Add another answer of the same request as a branch. The first answer remains visible. */
function besides(first) {
  const shown = nodeOf(first.parent).pick;
  const node = addNode(first.parent, { role: "assistant", running: true, tokens: [], model: first.model });
  nodeOf(first.parent).pick = Math.min(shown, siblings(first).length - 1);
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

function figures({ began, arrived }, usage, choices) {
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
