// A conversation as one page that needs no server, no script and no other file.
import { titleOf } from "./conversations.js";
import { el } from "./dom.js";
import { heatMap, view } from "./heat.js";
import { prose } from "./markdown/markdown.js";
import { chats } from "./models.js";
import { path } from "./tree.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'";

/** Return the shown branch of the open conversation as HTML. */
export function sharedPage() {
  const page = document.implementation.createHTMLDocument(titleOf());
  page.documentElement.lang = "en";
  page.documentElement.dataset.theme = document.documentElement.dataset.theme;
  const meta = (props) => page.importNode(el("meta", props));
  page.head.prepend(meta({ charset: "utf-8" }), meta({ "http-equiv": "Content-Security-Policy", content: POLICY }),
    meta({ name: "viewport", content: "width=device-width, initial-scale=1" }));
  const style = page.createElement("style");
  style.textContent = document.querySelector("style").textContent;
  page.head.append(style);
  page.body.className = "shared";
  page.body.append(page.importNode(el("main", {}, el("h1", {}, titleOf()),
    el("p", { className: "note" }, `A conversation with a model of eSurge, saved on ${new Date().toLocaleDateString("en", { dateStyle: "long" })}.`),
    path().map(turn)), true));
  for (const control of page.querySelectorAll("button, .popover")) control.remove();
  for (const token of page.querySelectorAll(".tok")) {
    token.title = token.getAttribute("aria-label") ?? "";
    for (const name of ["role", "tabindex", "aria-haspopup", "aria-expanded", "aria-label"]) token.removeAttribute(name);
  }
  return `<!doctype html>\n${page.documentElement.outerHTML}\n`;
}

function turn(node) {
  const name = { user: "You", tool: `Result of ${node.name}` }[node.role] ?? [node.model ?? "Assistant", node.label].filter(Boolean).join(" · ");
  const images = (node.images ?? []).map((src, place) => el("img", { src, alt: `Image ${place + 1}` }));
  const parts = [el("div", { className: "who" }, name), images.length ? el("div", { className: "images" }, images) : null];
  if (node.thoughts) parts.push(el("details", { className: "thoughts" }, el("summary", {}, "Thoughts"), el("div", {}, node.thoughts)));
  if (node.role !== "assistant") parts.push(el("div", { className: "said" }, node.text));
  else if (view.heated && node.tokens?.length) parts.push(heatMap(node, chats()));
  else parts.push(el("div", { className: "said prose" }, chats() ? prose(node.text) : el("p", { className: "tokens" }, node.text)));
  for (const call of node.calls ?? []) parts.push(el("div", { className: "call" }, el("b", {}, call.name), el("pre", {}, call.arguments)));
  if (node.error) parts.push(el("div", { className: "failed" }, node.error.message));
  if (node.figures) parts.push(el("div", { className: "figures note" }, node.figures));
  return el("article", { className: `turn ${node.role}` }, parts);
}
