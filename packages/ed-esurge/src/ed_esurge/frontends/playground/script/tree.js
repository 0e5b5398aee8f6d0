// The open conversation as a tree. Another answer or another question is a separate branch.

export const emptyTree = () => ({ nodes: { 0: { id: 0, parent: null, kids: [], pick: 0, role: "root" } }, next: 1 });
/** The open conversation; `title` is empty until the user names it. */
export const open = { id: "", title: "", created: 0, tree: emptyTree() };

export const nodeOf = (id) => open.tree.nodes[id];

export function addNode(parent, fields) {
  const tree = open.tree;
  const node = { id: tree.next++, parent, kids: [], pick: 0, text: "", ...fields };
  tree.nodes[node.id] = node;
  const above = tree.nodes[parent];
  above.pick = above.kids.push(node.id) - 1;
  return node;
}

/** Remove a node without answers. */
export function dropNode(node) {
  const kids = siblings(node);
  kids.splice(kids.indexOf(node.id), 1);
  nodeOf(node.parent).pick = Math.max(0, kids.length - 1);
  delete open.tree.nodes[node.id];
}

/** Return the nodes of the shown branch from the first message, optionally to the node `end`. */
export function path(end) {
  const nodes = [];
  if (end !== undefined) {
    for (let node = nodeOf(end); node.role !== "root"; node = nodeOf(node.parent)) nodes.unshift(node);
    return nodes;
  }
  for (let node = nodeOf(0); node.kids.length; nodes.push(node)) node = nodeOf(node.kids[node.pick]);
  return nodes;
}

export const tip = () => path().at(-1)?.id ?? 0;
export const siblings = (node) => nodeOf(node.parent).kids;

export function show(node) {
  for (let one = node; one.parent !== null; one = nodeOf(one.parent)) {
    nodeOf(one.parent).pick = siblings(one).indexOf(one.id);
  }
}

/** Return a copy of a tree without the state of the page. */
export function stored(tree) {
  const nodes = {};
  for (const [id, { running, editing, ...node }] of Object.entries(tree.nodes)) {
    nodes[id] = running ? { ...node, stopped: true } : node;
  }
  return { ...tree, nodes };
}
