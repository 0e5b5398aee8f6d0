// The models of the server, and which inputs each model accepts.
import { $, el } from "./dom.js";
import { emit } from "./events.js";
import { ask } from "./server.js";
import { settings } from "./settings.js";
import { TAB, keep, recall } from "./storage.js";

export const models = { cards: [] };
const CHATS = { chat: true, vision: false, audio: false };
const abilities = new Map();

export const chosen = () => $("model").value;
export const cardOf = (name) => models.cards.find((one) => one.id === name) ?? models.cards[0];
/** Return what a model accepts: `chat` (conversations instead of texts), `vision` and `audio`. */
export const abilityOf = (name) => abilities.get(name) ?? CHATS;

/** Return whether a request to a model is a conversation. Other requests continue a text. */
export function chats(values = settings, model = chosen()) {
  return values.mode === "chat" || (values.mode === "auto" && abilityOf(model).chat);
}

/** Return the default of `max_tokens`: at most half of the context of a small model. */
export const mostTokens = (model) => Math.min(1024, Math.ceil((cardOf(model)?.max_model_len ?? 1024) / 2));

export function modelOptions() {
  return models.cards.map((one) => el("option", { value: one.id }, one.parent ? `${one.id} (on ${one.parent})` : one.id));
}

export async function loadModels() {
  models.cards = (await (await ask("v1/models")).json()).data;
  const wanted = chosen() || recall(TAB, "model", "");
  $("model").replaceChildren(...modelOptions());
  if (models.cards.some((one) => one.id === wanted)) $("model").value = wanted;
  abilities.clear();
  await choose();
}

/** Read the abilities of a model once. */
export async function inspect(model) {
  if (abilities.has(model) || !model) return;
  const found = { ...CHATS };
  try {
    const answer = await (await ask(`props?model=${encodeURIComponent(model)}`)).json();
    Object.assign(found, { vision: answer.modalities.vision, audio: answer.modalities.audio });
  } catch { /* a model without properties accepts text */ }
  // A model that transcribes accepts no prompt.
  if (!found.audio) found.chat = await hasTemplate(model);
  abilities.set(model, found);
}

async function hasTemplate(model) {
  try {
    await ask("tokenize", { model, messages: [{ role: "user", content: "" }] });
    return true;
  } catch (error) {
    return error.code !== "no_chat_template";
  }
}

export async function choose() {
  keep(TAB, "model", chosen());
  await inspect(chosen());
  emit("model");
}

export function buildModels() {
  $("model").addEventListener("change", choose);
}
