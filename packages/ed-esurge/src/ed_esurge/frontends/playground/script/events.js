// Events between modules that do not import each other, such as "tree": the conversation changed.

const listeners = {};

export function on(name, listener) {
  (listeners[name] ??= []).push(listener);
}

export function emit(name, value) {
  for (const listener of listeners[name] ?? []) listener(value);
}
