// The list of conversations: open, rename, delete, export, share and import.
import { isIdle, stop } from "./answering.js";
import { MOST_BYTES } from "./checks.js";
import { begin, exported, imported, listed, load, remove, rename } from "./conversations.js";
import { persists } from "./database.js";
import { $, el, iconButton, speak, textButton } from "./dom.js";
import { on } from "./events.js";
import { download, fileName } from "./files.js";
import { notice } from "./notices.js";
import { sharedPage } from "./share.js";
import { open } from "./tree.js";

const MOST = 400; // rows of the list
const state = { renaming: "" };

async function draw() {
  const all = await listed();
  const rows = all.slice(0, MOST).map(row);
  if (!rows.length) rows.push(el("p", { className: "note" }, (await persists()) ? "Conversations are stored in this browser." : "This browser stores no conversations. They last until the page is closed."));
  if (all.length > MOST) rows.push(el("p", { className: "note" }, `${all.length - MOST} older conversations are not listed. Export all conversations to read them.`));
  $("conversations").replaceChildren(...rows);
  $("export-all").disabled = !all.length;
  $("conversations").querySelector(".rename")?.focus();
}

function row(one) {
  const current = one.id === open.id;
  if (state.renaming === one.id) return el("div", { className: "conversation current" }, nameInput(one));
  return el("div", { className: `conversation${current ? " current" : ""}` },
    el("button", { type: "button", className: "open", title: one.title, "aria-current": current ? "true" : null, onclick: () => openOne(one.id) }, one.title),
    current && el("div", { className: "row" },
      iconButton("edit", "Rename the conversation", () => { state.renaming = one.id; draw(); }),
      iconButton("export", "Export the conversation", async () => download(await exported([one.id]), fileName(one.title, "json"), "application/json")),
      iconButton("share", "Save as a page to share", () => download(sharedPage(), fileName(one.title, "html"), "text/html")),
      iconButton("delete", "Delete the conversation", () => { stop(); remove(one.id); })));
}

function nameInput(one) {
  const finish = (name) => {
    if (state.renaming !== one.id) return;
    state.renaming = "";
    if (name === null) draw();
    else rename(one.id, name);
  };
  const input = el("input", { type: "text", className: "rename", value: one.title, maxLength: 200, "aria-label": "Title of the conversation" });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(input.value);
    if (event.key === "Escape") { finish(null); event.stopPropagation(); }
  });
  input.addEventListener("blur", () => finish(input.value));
  return input;
}

async function openOne(id) {
  if (!isIdle()) stop();
  if (!(await load(id))) notice("This conversation does not exist any more.");
}

async function take(file) {
  try {
    if (file.size > MOST_BYTES) throw new Error(`The file has ${file.size} bytes, and the maximum is ${MOST_BYTES}.`);
    const ids = await imported(await file.text());
    speak(`${ids.length} conversations imported`);
    if (ids.length) await load(ids[0]);
  } catch (error) {
    notice(`Nothing is imported. ${error.message}`);
  }
}

export function buildHistory() {
  const picker = el("input", { type: "file", id: "import-file", accept: "application/json,.json", hidden: true, "aria-label": "Exported conversations", onchange: async () => {
    for (const file of picker.files) await take(file);
    picker.value = "";
  } });
  $("history-actions").append(
    textButton("Import", () => picker.click()), picker,
    textButton("Export all", async () => download(await exported((await listed()).map((one) => one.id)), "conversations.json", "application/json"), { id: "export-all" }));
  $("new").addEventListener("click", () => {
    stop();
    begin();
    $("prompt").focus();
  });
  on("titles", draw);
  on("opened", draw);
  draw();
}
