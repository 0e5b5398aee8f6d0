// Files of the user: download a text, and select a file.
import { el } from "./dom.js";

/** Offer a text as a download. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** Return a name for a file that every system accepts. */
export function fileName(title, ending) {
  const name = title.normalize("NFKD").replace(/[^\w\s-]/g, "").trim().replace(/\s+/g, "-").slice(0, 50);
  return `${name || "conversation"}.${ending}`;
}
