// The conversation is a tree. Another answer or another question is a separate branch.
const EMPTY = () => ({ nodes: { 0: { id: 0, parent: null, kids: [], pick: 0, role: "root" } }, next: 1 });
let tree = recall(TAB, "tree", EMPTY());

function addNode(parent, fields) {
  const node = { id: tree.next++, parent, kids: [], pick: 0, text: "", ...fields };
  tree.nodes[node.id] = node;
  const above = tree.nodes[parent];
  above.pick = above.kids.push(node.id) - 1;
  return node;
}

/** Return the nodes of the shown branch from the first message, optionally to the node `end`. */
function path(end) {
  const nodes = [];
  if (end !== undefined) {
    for (let node = tree.nodes[end]; node.role !== "root"; node = tree.nodes[node.parent]) nodes.unshift(node);
    return nodes;
  }
  for (let node = tree.nodes[0]; node.kids.length; nodes.push(node)) node = tree.nodes[node.kids[node.pick]];
  return nodes;
}

const tip = () => path().at(-1)?.id ?? 0;

function siblings(node) {
  return tree.nodes[node.parent].kids;
}

function show(node) {
  for (let one = node; one.parent !== null; one = tree.nodes[one.parent]) {
    tree.nodes[one.parent].pick = siblings(one).indexOf(one.id);
  }
}

/** Store the texts without the probabilities of tokens, which would fill the storage. */
function saveTree() {
  const nodes = {};
  for (const [id, node] of Object.entries(tree.nodes)) {
    nodes[id] = { ...node, tokens: undefined, running: undefined };
  }
  keep(TAB, "tree", { ...tree, nodes });
}

/** Return a branch as messages of a chat request. */
function messagesOf(nodes) {
  const messages = [];
  if (settings.system.trim()) messages.push({ role: "system", content: settings.system });
  for (const node of nodes) {
    const message = { role: node.role, content: node.text };
    if (node.calls?.length) {
      message.tool_calls = node.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
      message.content = node.text || null;
    }
    if (node.role === "tool") message.tool_call_id = node.call;
    messages.push(message);
  }
  return messages;
}
