// The API key, stored in this tab only, and its dialog.
import { $ } from "./dom.js";
import { emit } from "./events.js";
import { TAB, keep, recall } from "./storage.js";

export const access = { key: recall(TAB, "key", "") };

export function askForKey(error = "") {
  if ($("key-dialog").open) return;
  $("key-value").value = access.key;
  $("key-error").textContent = error ?? "";
  $("key-dialog").showModal();
}

function useKey(value) {
  access.key = value.trim();
  keep(TAB, "key", access.key);
  $("key-dialog").close();
  emit("key");
}

export function buildKey() {
  $("key").addEventListener("click", () => askForKey());
  $("key-use").addEventListener("click", () => useKey($("key-value").value));
  $("key-forget").addEventListener("click", () => useKey(""));
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-value").addEventListener("keydown", (event) => {
    if (event.key === "Enter") useKey($("key-value").value);
  });
}
