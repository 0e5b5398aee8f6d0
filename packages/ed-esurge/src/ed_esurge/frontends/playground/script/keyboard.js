// Shortcuts of the page: Escape closes or stops, and a slash moves to the prompt.
import { closeAlternatives, popover } from "./alternatives.js";
import { stop } from "./answering.js";
import { closeDrawer } from "./columns.js";
import { $ } from "./dom.js";

export function buildKeyboard() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, dialog");
    if (event.key === "Escape") {
      if (popover.opener) closeAlternatives(true);
      else if (!closeDrawer()) stop();
    } else if (event.key === "/" && !typing) {
      event.preventDefault();
      $("prompt").focus();
    }
  });
}
