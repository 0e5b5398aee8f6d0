// The three columns. On wide screens a button hides a column; on narrow screens a column is a drawer.
import { $ } from "./dom.js";
import { on } from "./events.js";
import { BROWSER, keep, recall } from "./storage.js";

const NAMES = ["history", "engine", "settings"];
const narrow = matchMedia("(max-width: 1120px)");
const hidden = new Set(recall(BROWSER, "columns", []));

const drawerOf = () => NAMES.find((name) => $(name).classList.contains("open"));

/** Close the open drawer, and return whether there was one. */
export function closeDrawer() {
  const name = drawerOf();
  if (name) drawer(name, false);
  return Boolean(name);
}

function drawer(id, open) {
  for (const name of NAMES) $(name).classList.toggle("open", open && name === id);
  $("scrim").hidden = !open;
  apply();
  if (open) $(id).querySelector(".close").focus();
  else $(`open-${id}`).focus();
}

function apply() {
  for (const name of NAMES) {
    const shown = narrow.matches ? $(name).classList.contains("open") : !hidden.has(name);
    $(`open-${name}`).setAttribute("aria-expanded", String(shown));
    document.body.classList.toggle(`no-${name}`, hidden.has(name));
  }
}

function toggle(name) {
  if (narrow.matches) return drawer(name, !$(name).classList.contains("open"));
  if (!hidden.delete(name)) hidden.add(name);
  keep(BROWSER, "columns", [...hidden]);
  return apply();
}

export function buildColumns() {
  for (const name of NAMES) {
    $(`open-${name}`).addEventListener("click", () => toggle(name));
    $(name).querySelector(".close").addEventListener("click", () => toggle(name));
  }
  $("scrim").addEventListener("click", closeDrawer);
  narrow.addEventListener("change", () => { closeDrawer(); apply(); });
  on("opened", () => { if (drawerOf() === "history") closeDrawer(); });
  apply();
}
