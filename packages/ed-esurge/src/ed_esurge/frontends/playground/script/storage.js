// Small values as JSON in the storage of the tab or of the browser, which can be full or disabled.

const storeOf = (name) => { try { return window[name]; } catch { return { getItem: () => null, setItem() {} }; } };
export const TAB = storeOf("sessionStorage");
export const BROWSER = storeOf("localStorage");

export function keep(store, name, value) {
  try {
    store.setItem(`esurge.${name}`, JSON.stringify(value));
  } catch { /* the value is not stored */ }
}

export function recall(store, name, otherwise) {
  try {
    return JSON.parse(store.getItem(`esurge.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
