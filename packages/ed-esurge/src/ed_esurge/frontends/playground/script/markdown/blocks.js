// Blocks of Markdown: paragraphs, headings, lists, quotes, tables, code and displayed formulas.
import { copy } from "../copying.js";
import { el, textButton } from "../dom.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";
import { formula } from "./formula.js";
import { Source } from "./source.js";
import { isDelimiter, table } from "./table.js";

const DEEPEST = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+•]|\d{1,9}[.)])([ \t]+|$)/;
const FORMULA = { "$$": "$$", "\\[": "\\]" };

const blank = (line) => !line.text.trim();
const indent = (line) => line.text.match(/^[ \t]*/)[0].replaceAll("\t", "    ").length;

/** Return the elements of lines. `style.depth`: the number of quotes and lists around the lines. */
export function blocksOf(lines, style) {
  const parts = [];
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at += 1; continue; }
    const [node, next] = block(lines, at, style);
    parts.push(node);
    at = next;
  }
  return parts;
}

function block(lines, at, style) {
  const text = lines[at].text;
  let found;
  if ((found = text.match(FENCE))) return fence(lines, at, found, style);
  if ((found = text.match(HEADING))) return [heading(lines[at], found, style), at + 1];
  if (RULE.test(text)) return [el("hr"), at + 1];
  if (style.depth < DEEPEST) {
    if (QUOTE.test(text)) return quote(lines, at, style);
    if (ITEM.test(text)) return list(lines, at, style);
  }
  if (lines[at + 1] && isDelimiter(lines[at + 1].text, text)) return table(lines, at, style);
  const opening = text.trim().slice(0, 2);
  if (FORMULA[opening] && !style.asSource) {
    const shown = displayed(lines, at, opening);
    if (shown) return shown;
  }
  return paragraph(lines, at, style);
}

/** Return whether a line begins a block, and so ends a paragraph. */
function begins(lines, at) {
  const text = lines[at].text;
  const item = text.match(ITEM);
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text)
    || (item && item[3]) || text.trim() === "$$" || text.trim() === "\\["
    || (lines[at + 1] && isDelimiter(lines[at + 1].text, text));
}

function paragraph(lines, at, style) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines, end)) end += 1;
  return [el("p", {}, inline(Source.joined(lines.slice(at, end).map((line) => line.trim())), style)), end];
}

function heading(line, found, style) {
  const begin = line.text.indexOf(found[1]) + found[1].length;
  const content = line.slice(begin).trim();
  const end = content.text.replace(/[ \t]+#+$/, "").length;
  // The page has the levels 1 and 2.
  return el(`h${Math.min(6, found[1].length + 2)}`, {}, inline(content.slice(0, end), style));
}

function fence(lines, at, found, style) {
  const close = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end].text)) end += 1;
  const removed = indent(lines[at]);
  const content = Source.joined(lines.slice(at + 1, end).map((line) => line.slice(Math.min(removed, indent(line)))));
  const language = found[2].toLowerCase();
  const code = el("code", {}, style.asSource ? style.leaf(content) : highlighted(content.text, language));
  return [el("div", { className: "code" },
    el("div", { className: "bar" }, language || "code", textButton("Copy", (event) => copy(content.text, event.currentTarget))),
    el("pre", { tabIndex: 0 }, code)), end + 1];
}

function quote(lines, at, style) {
  const inner = [];
  let end = at;
  for (; end < lines.length && !blank(lines[end]); end += 1) {
    const found = lines[end].text.match(QUOTE);
    if (!found && begins(lines, end)) break;
    inner.push(lines[end].slice(found ? found[0].length : 0));
  }
  return [el("blockquote", {}, blocksOf(inner, { ...style, depth: style.depth + 1 })), end];
}

const kindOf = (marker) => (/\d/.test(marker) ? `ordered${marker.at(-1)}` : "bullets");

function list(lines, at, style) {
  const first = lines[at].text.match(ITEM);
  const kind = kindOf(first[2]);
  const node = el(kind === "bullets" ? "ul" : "ol", kind === "bullets" ? {} : { start: parseInt(first[2], 10) });
  let end = at;
  while (end < lines.length) {
    const found = lines[end].text.match(ITEM);
    if (!found || kindOf(found[2]) !== kind || RULE.test(lines[end].text)) break;
    const outer = found[1].length;
    const inner = [lines[end].slice(found[0].length)];
    // Models often indent the content of "1. " by two spaces only.
    let next = end + 1;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      if (blank(line)) {
        const after = lines.slice(next).find((one) => !blank(one));
        if (!after || indent(after) < outer + 2) break;
        inner.push(line);
      } else if (indent(line) >= outer + 2) {
        inner.push(line.slice(Math.min(indent(line), found[0].length || outer + 2)));
      } else if (begins(lines, next) || blank(lines[next - 1])) break;
      else inner.push(line);
    }
    node.append(item(inner, style));
    end = next;
    // Blank lines between two items belong to the list.
    let after = end;
    while (after < lines.length && blank(lines[after])) after += 1;
    if (after < lines.length && ITEM.test(lines[after].text)) end = after;
  }
  return [node, end];
}

function item(lines, style) {
  const task = lines[0].text.match(/^\[([ xX])\][ \t]/);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const parts = blocksOf(lines, { ...style, depth: style.depth + 1 });
  // The text of a short item needs no paragraph around itself.
  const inner = parts.flatMap((part, place) => (part.matches("p") && place === 0 ? [...part.childNodes] : [part]));
  const box = task && el("span", { className: "task", role: "img", "aria-label": task[1] === " " ? "not done" : "done" }, task[1] === " " ? "☐ " : "☑ ");
  return el("li", {}, box, inner);
}

function displayed(lines, at, opening) {
  const closing = FORMULA[opening];
  const text = [];
  for (let end = at; end < lines.length && end < at + 200; end += 1) {
    const line = end === at ? lines[at].text.trim().slice(2) : lines[end].text;
    const close = line.indexOf(closing);
    if (close < 0) { text.push(line); continue; }
    if (line.slice(close + 2).trim()) return null;
    text.push(line.slice(0, close));
    return [formula(text.join("\n"), true), end + 1];
  }
  return null;
}
