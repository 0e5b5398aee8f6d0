// Copying to the clipboard, with a visible result. `navigator.clipboard` requires HTTPS or localhost.
import { el, icon, speak } from "./dom.js";

const SHOWN = 1600; // milliseconds

/** Copy a text, and show the result on the button. */
export async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copiedFromSelection(text, button);
  }
  const label = copied ? "Copied" : "Not copied";
  speak(copied ? "Copied" : "The browser does not allow this page to copy");
  if (button.classList.contains("done")) return;
  const before = [...button.childNodes];
  button.classList.add("done");
  button.replaceChildren(...(button.matches(".icon") ? [icon(copied ? "check" : "close"), el("span", { className: "tip" }, label)] : [label]));
  setTimeout(() => {
    button.classList.remove("done");
    button.replaceChildren(...before);
  }, SHOWN);
}

function copiedFromSelection(text, button) {
  const area = el("textarea", { value: text, className: "sr", readOnly: true, "aria-hidden": "true" });
  // A modal dialog allows selections only inside of itself.
  (button.closest("dialog") ?? document.body).append(area);
  area.select();
  let copied = false;
  try {
    copied = document.execCommand("copy");
  } catch { /* not allowed */ }
  area.remove();
  button.focus();
  return copied;
}
