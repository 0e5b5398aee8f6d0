// A failed answer: the error of the server, what the user can do, and the buttons for this.
import { answer, retry } from "./answering.js";
import { el, textButton } from "./dom.js";
import { askForKey } from "./key.js";

const ADVICE = {
  connection: "Check that the server runs. The text that has arrived is kept.",
  context_length_exceeded: "Start a new conversation, edit an earlier message, or reduce the maximum tokens.",
};
const BY_STATUS = {
  400: "Change the setting that the message names.",
  401: "Enter a valid API key.",
  404: "Choose another model.",
  429: "The server limits the number of requests. Try again in a moment.",
  503: "The server is busy or starting. Try again in a moment.",
};

export function failureOf(node) {
  const { message, code, status } = node.error;
  const advice = ADVICE[code] ?? BY_STATUS[status];
  return el("div", { className: "failed", role: "alert" },
    el("div", {}, message), code && el("div", {}, el("code", {}, code)),
    advice && el("p", {}, advice), el("p", {}, "Later requests do not contain this answer."),
    el("div", { className: "row" },
      textButton("Try again", () => retry(node), { className: "text strong" }),
      node.text && !node.calls?.length && textButton("Continue the answer", () => answer(node.parent, node), { className: "text strong" }),
      status === 401 && textButton("Enter an API key", () => askForKey(), { className: "text strong" })));
}
