// The color theme: that of the system, light or dark.
import { $ } from "./dom.js";
import { BROWSER, keep, recall } from "./storage.js";

const THEMES = ["system", "light", "dark"];
const night = matchMedia("(prefers-color-scheme: dark)");
let theme = recall(BROWSER, "theme", "system");

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (night.matches ? "dark" : "light") : theme;
  $("theme").title = `Theme: ${theme}`;
  $("theme").querySelector(".sr").textContent = `Theme: ${theme}. Change`;
}

export function buildTheme() {
  night.addEventListener("change", applyTheme);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    keep(BROWSER, "theme", theme);
    applyTheme();
  });
  applyTheme();
}
