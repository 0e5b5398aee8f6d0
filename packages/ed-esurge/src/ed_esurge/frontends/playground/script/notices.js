// Short notices at the bottom of the page, with an optional action such as "Undo".
import { $, el, iconButton, textButton } from "./dom.js";

const SHOWN = 10000; // milliseconds

/** Show a text. `action`: the label of a button; `run`: its function. */
export function notice(text, action = "", run = null) {
  const close = () => node.remove();
  const node = el("div", { className: "notice" }, el("span", {}, text),
    action && textButton(action, () => { close(); run(); }, { className: "text strong" }),
    iconButton("close", "Close the notice", close));
  $("notices").append(node);
  while ($("notices").children.length > 3) $("notices").firstChild.remove();
  setTimeout(close, SHOWN);
}
