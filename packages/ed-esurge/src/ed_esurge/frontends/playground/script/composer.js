// The input of the next message.
import { answer, answerTwice, isIdle, stop } from "./answering.js";
import { hasImages, takeImages } from "./attachments.js";
import { compares, variants } from "./compare.js";
import { $, icon, speak } from "./dom.js";
import { on } from "./events.js";
import { addNode, tip } from "./tree.js";

function send(text) {
  if (!isIdle() || !(text.trim() || hasImages())) return;
  $("prompt").value = "";
  grow();
  const images = takeImages();
  const question = addNode(tip(), { role: "user", text, ...(images.length ? { images } : {}) });
  $("log").scrollTop = $("log").scrollHeight;
  const answers = compares() ? answerTwice(question.id, variants()) : answer(question.id);
  answers.catch((error) => speak(error.message));
}

function grow() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function working(yes) {
  const button = $("send");
  button.toggleAttribute("data-stop", yes);
  button.setAttribute("aria-label", yes ? "Stop" : "Send");
  button.replaceChildren(icon(yes ? "stop" : "send"));
  $("log").setAttribute("aria-busy", String(yes));
}

export function buildComposer() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (isIdle()) send($("prompt").value);
    else stop();
  });
  $("prompt").addEventListener("input", grow);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (isIdle()) send($("prompt").value);
    }
  });
  on("send", send);
  on("working", working);
}
