// Building blocks of the page: elements, icons, and storage of the tab and the browser.
const $ = (id) => document.getElementById(id);

/** Return an element. Text is never parsed as HTML. */
function el(tag, props = {}, ...kids) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...kids.flat().filter((kid) => kid !== null && kid !== undefined && kid !== false));
  return node;
}

function svg(tag, props = {}, ...kids) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...kids);
  return node;
}

const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

function iconButton(name, label, onclick, more = {}) {
  return el("button", { type: "button", className: "icon", title: label, "aria-label": label, onclick, ...more }, icon(name));
}

/** Announce a text to screen readers. */
function speak(text) {
  $("spoken").textContent = text;
}

/** Write JSON to a storage of the browser, which can be full or disabled. */
function keep(store, name, value) {
  try {
    store.setItem(`esurge.${name}`, JSON.stringify(value));
  } catch { /* the value is not stored */ }
}

function recall(store, name, otherwise) {
  try {
    return JSON.parse(store.getItem(`esurge.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const storeOf = (name) => { try { return window[name]; } catch { return { getItem: () => null, setItem() {} }; } };
const TAB = storeOf("sessionStorage"), BROWSER = storeOf("localStorage");

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    speak("Copied");
    button.classList.add("done");
  } catch {
    speak("The browser does not allow this page to copy");
  }
}

const THEMES = ["system", "light", "dark"];
const night = matchMedia("(prefers-color-scheme: dark)");
let theme = recall(BROWSER, "theme", "system");

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (night.matches ? "dark" : "light") : theme;
  const label = { system: "system", light: "light", dark: "dark" }[theme];
  $("theme").title = `Theme: ${label}`;
  $("theme").querySelector(".sr").textContent = `Theme: ${label}. Change`;
}

night.addEventListener("change", applyTheme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  keep(BROWSER, "theme", theme);
  applyTheme();
});
applyTheme();
