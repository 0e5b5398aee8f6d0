// Links of untrusted text. Only web and mail addresses become links, and a link opens a new tab.
import { el } from "../dom.js";

const LONGEST = 2000;

/** Return an address that a link may have, or null. */
export function safe(address) {
  if (address.length > LONGEST || !/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Return a link, or the nodes alone if the address is not allowed. The title shows the address. */
export function link(address, nodes) {
  const href = safe(address);
  if (href === null) return nodes;
  return [el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, nodes)];
}
