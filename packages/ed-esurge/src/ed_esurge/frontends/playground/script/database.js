// Conversations in IndexedDB: titles for the list, and trees with the probabilities of tokens.

const STORES = ["titles", "trees"];
const memory = { titles: new Map(), trees: new Map() };

const opening = new Promise((done) => {
  try {
    const request = indexedDB.open("esurge", 1);
    request.onupgradeneeded = () => STORES.forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
    request.onsuccess = () => done(request.result);
    request.onerror = () => done(null);
  } catch {
    done(null);
  }
});

/** Return whether conversations persist. Without IndexedDB the page keeps them until a reload. */
export const persists = () => opening.then(Boolean);

export async function titles() {
  return read("titles", (store) => store.getAll(), () => [...memory.titles.values()]);
}

export async function treeOf(id) {
  return (await read("trees", (store) => store.get(id), () => memory.trees.get(id)))?.tree;
}

/** Write a conversation: {id, title, created, changed, tree}. */
export async function write({ tree, ...title }) {
  await change((stores) => {
    stores.titles.put(title);
    stores.trees.put({ id: title.id, tree });
  }, () => {
    memory.titles.set(title.id, title);
    memory.trees.set(title.id, structuredClone({ id: title.id, tree }));
  });
}

export async function erase(id) {
  await change((stores) => STORES.forEach((name) => stores[name].delete(id)),
    () => STORES.forEach((name) => memory[name].delete(id)));
}

async function read(name, find, otherwise) {
  const database = await opening;
  if (!database) return otherwise();
  return new Promise((done, failed) => {
    const request = find(database.transaction(name).objectStore(name));
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
}

async function change(apply, otherwise) {
  const database = await opening;
  if (!database) return otherwise();
  return new Promise((done, failed) => {
    const transaction = database.transaction(STORES, "readwrite");
    transaction.oncomplete = () => done();
    transaction.onerror = transaction.onabort = () => failed(transaction.error ?? new Error("the browser's storage failed"));
    apply(Object.fromEntries(STORES.map((name) => [name, transaction.objectStore(name)])));
  });
}
