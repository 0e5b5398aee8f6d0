// The conversations of this browser: open, save, rename, delete, export and import.
import { conversationsOf, FORMAT } from "./checks.js";
import { erase, titles, treeOf, write } from "./database.js";
import { emit } from "./events.js";
import { notice } from "./notices.js";
import { TAB, keep, recall } from "./storage.js";
import { emptyTree, open, path, stored } from "./tree.js";

const LONGEST = 60;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("esurge") : null;

/** Return the conversations without their messages, the last changed first. */
export async function listed() {
  return (await titles()).sort((one, other) => other.changed - one.changed);
}

/** Return the title: the name that the user has given, or the beginning of the first question. */
export function titleOf(conversation = open) {
  if (conversation.title) return conversation.title;
  const nodes = conversation.tree.nodes;
  const first = nodes[nodes[0].kids[nodes[0].pick]]?.text.trim().split("\n")[0] ?? "";
  return (first.length > LONGEST ? `${first.slice(0, LONGEST - 1)}…` : first) || "New conversation";
}

export function begin() {
  Object.assign(open, { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", created: Date.now(), tree: emptyTree() });
  keep(TAB, "open", open.id);
  emit("opened");
}

/** Open a stored conversation. Return whether the conversation exists. */
export async function load(id) {
  const tree = await treeOf(id);
  const found = (await titles()).find((one) => one.id === id);
  if (!tree || !found) return false;
  Object.assign(open, { id, title: found.name, created: found.created, tree });
  keep(TAB, "open", id);
  emit("opened");
  return true;
}

/** Open the conversation that was open before a reload of the tab. */
export async function restore() {
  const id = recall(TAB, "open", "");
  if (!id || !(await load(id))) begin();
}

/** Save the open conversation when it has a message. */
export async function save() {
  if (!path().length) return;
  await put({ id: open.id, name: open.title, title: titleOf(), created: open.created, changed: Date.now(), tree: stored(open.tree) });
}

export async function rename(id, name) {
  const found = (await titles()).find((one) => one.id === id);
  const tree = await treeOf(id);
  if (!found || !tree) return;
  if (id === open.id) open.title = name.trim();
  await put({ ...found, name: name.trim(), title: titleOf({ title: name.trim(), tree }), tree });
}

/** Delete a conversation. The notice allows undoing the deletion. */
export async function remove(id) {
  const found = (await titles()).find((one) => one.id === id);
  const tree = await treeOf(id);
  if (!found) return;
  await erase(id);
  tell(id);
  const was = id === open.id;
  if (was) begin();
  notice(`Deleted “${found.title}”.`, "Undo", async () => {
    await put({ ...found, tree });
    if (was) await load(id);
  });
}

/** Return a JSON text with the given conversations. */
export async function exported(ids) {
  const all = [];
  for (const one of await listed()) {
    if (ids.includes(one.id)) all.push({ title: one.name, created: one.created, changed: one.changed, tree: await treeOf(one.id) });
  }
  return JSON.stringify({ format: FORMAT, version: 1, conversations: all });
}

/** Add the conversations of an exported text, and return their ids. */
export async function imported(content) {
  const ids = [];
  for (const one of conversationsOf(content)) {
    const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
    await put({ id, name: one.title, title: titleOf(one), created: one.created, changed: one.changed, tree: one.tree });
    ids.push(id);
  }
  return ids;
}

async function put(conversation) {
  try {
    await write(conversation);
  } catch (error) {
    notice(`The conversation is not stored: ${error.message}. Export it, or delete other conversations.`);
  }
  tell(conversation.id);
}

/** Update the lists of this tab and of other tabs. */
function tell(id) {
  channel?.postMessage(id);
  emit("titles");
}

export function watchOtherTabs(isIdle) {
  channel?.addEventListener("message", ({ data }) => {
    emit("titles");
    if (data === open.id && isIdle()) load(data).then((exists) => exists || begin());
  });
}
