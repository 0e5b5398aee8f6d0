// Tables: a header, a line of dashes and colons, and rows of cells between bars.
import { el } from "../dom.js";
import { inline } from "./inline.js";

const DELIMITER = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MOST_COLUMNS = 64;

/** Return whether a line separates a header of as many cells from the rows of a table. */
export function isDelimiter(text, header) {
  if (!text.includes("-") || !(text.includes("|") && header.includes("|")) || !DELIMITER.test(text)) return false;
  return text.trim().replace(/^\||\|$/g, "").split("|").length === bounds(header).length;
}

export function table(lines, at, style) {
  const sides = lines[at + 1].text.trim().replace(/^\||\|$/g, "").split("|").map((one) => sideOf(one.trim()));
  const row = (line, tag) => {
    const cells = bounds(line.text).slice(0, Math.min(sides.length, MOST_COLUMNS));
    const nodes = cells.map(([begin, end], place) => el(tag, { className: sides[place] }, inline(line.slice(begin, end).trim(), style)));
    while (nodes.length < sides.length && nodes.length < MOST_COLUMNS) nodes.push(el(tag));
    return el("tr", {}, nodes);
  };
  let end = at + 2;
  while (end < lines.length && lines[end].text.trim() && lines[end].text.includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [el("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, body))), end];
}

const sideOf = (dashes) => (dashes.endsWith(":") ? (dashes.startsWith(":") ? "center" : "right") : "");

/** Return the begin and end of each cell. A bar in code or after a backslash is content. */
function bounds(text) {
  const cells = [];
  let begin = 0, code = false;
  for (let at = 0; at <= text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "`") code = !code;
    else if (at === text.length || (text[at] === "|" && !code)) {
      cells.push([begin, at]);
      begin = at + 1;
    }
  }
  if (cells.length === 0 || begin <= text.length) cells.push([begin, text.length]);
  const empty = ([from, to]) => !text.slice(from, to).trim();
  if (empty(cells[0])) cells.shift();
  while (cells.length && empty(cells.at(-1)) && cells.at(-1)[0] >= text.trimEnd().length) cells.pop();
  return cells;
}
