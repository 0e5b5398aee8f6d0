// Validation of imported conversations: a file contains only the known fields of the known types.
import { emptyTree } from "./tree.js";

export const FORMAT = "esurge-conversations";
export const MOST_BYTES = 2 ** 26;
const MOST_NODES = 20000, MOST_CONVERSATIONS = 2000;

const text = (value) => typeof value === "string";
const number = (value) => typeof value === "number" && Number.isFinite(value);
const whole = (value) => Number.isInteger(value) && value >= 0;
const score = (value) => value === null || number(value);
const listOf = (right) => (value) => Array.isArray(value) && value.every(right);
const shape = (fields) => (value) => value !== null && typeof value === "object"
  && Object.entries(fields).every(([name, right]) => right(value[name]));
/** An image of the page is never loaded from a network. */
export const isImage = (value) => text(value) && /^data:image\/(?:png|jpeg|gif|webp|bmp);base64,[\w+/=]+$/.test(value);

const NODE = {
  text, thoughts: text, model: text, label: text, name: text, call: text, finish: text, figures: text,
  stopped: (value) => value === true, edited: (value) => value === true, pair: whole,
  error: shape({ message: text }), images: listOf(isImage),
  calls: listOf(shape({ name: text, arguments: text })),
  tokens: listOf(shape({ token: text, logprob: score, bytes: listOf(whole), top: listOf((one) => Array.isArray(one) && text(one[0]) && score(one[1])) })),
};

/** Return the conversations of a file: [{title, created, changed, tree}]. Raise an error otherwise. */
export function conversationsOf(content) {
  let file;
  try {
    file = JSON.parse(content);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT) throw new Error(`The file has no field "format": "${FORMAT}". Choose a file that this page exported.`);
  const all = file.conversations;
  if (!Array.isArray(all) || all.length > MOST_CONVERSATIONS) throw new Error(`"conversations" must be a list of at most ${MOST_CONVERSATIONS} conversations.`);
  return all.map((one, place) => {
    try {
      return { title: text(one.title) ? one.title : "", created: whole(one.created) ? one.created : Date.now(), changed: whole(one.changed) ? one.changed : Date.now(), tree: treeFrom(one.tree) };
    } catch (error) {
      throw new Error(`Conversation ${place + 1} is invalid: ${error.message}`);
    }
  });
}

/** Build a tree from the root, so that each node has one parent. */
function treeFrom(given) {
  const tree = emptyTree();
  const open = [[given.nodes[0], 0]];
  const ids = new Map([[0, 0]]);
  while (open.length) {
    const [source, id] = open.pop();
    if (!listOf(whole)(source?.kids)) throw new Error("a message has no list of answers");
    const target = tree.nodes[id];
    for (const kid of source.kids) {
      const found = given.nodes[kid];
      if (!found || ids.has(kid)) throw new Error(`message ${kid} is absent or has two parents`);
      if (tree.next > MOST_NODES) throw new Error(`it has more than ${MOST_NODES} messages`);
      ids.set(kid, tree.next);
      target.kids.push(tree.next);
      tree.nodes[tree.next] = { ...nodeFrom(found), id: tree.next, parent: id, kids: [], pick: 0 };
      open.push([found, tree.next]);
      tree.next += 1;
    }
    target.pick = whole(source.pick) && source.pick < target.kids.length ? source.pick : 0;
  }
  for (const node of Object.values(tree.nodes)) {
    if (node.pair !== undefined) node.pair = ids.get(node.pair);
    if (node.pair === undefined) delete node.pair;
  }
  return tree;
}

function nodeFrom(given) {
  if (!["user", "assistant", "tool"].includes(given.role)) throw new Error(`role ${JSON.stringify(given.role)} is not user, assistant or tool`);
  const node = { role: given.role, text: "", tokens: [] };
  for (const [name, right] of Object.entries(NODE)) {
    if (given[name] === undefined || given[name] === null) continue;
    if (!right(given[name])) throw new Error(`the field ${name} of a message has another type`);
    node[name] = given[name];
  }
  return node;
}
