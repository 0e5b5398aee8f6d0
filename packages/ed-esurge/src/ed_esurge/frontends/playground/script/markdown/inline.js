// Inline Markdown: emphasis, code, links and formulas.
import { el } from "../dom.js";
import { formula } from "./formula.js";
import { link } from "./links.js";

const DEEPEST = 8;
const MARKS = [["***", "strong", "em"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const LABEL = 1000; // characters of a label or an address in which a bracket is searched
const BARE = /https?:\/\/[^\s<>"'`|)\]}]*[^\s<>"'`|)\]}.,;:!?]/iy;
const ESCAPED = /[!-/:-@[-`{-~]/;

/** Return the nodes of a piece of text. */
export function inline(source, style, depth = 0) {
  if (depth > DEEPEST) return style.leaf(source);
  const parts = [];
  const text = source.text;
  // Marks that have no closing mark in the rest of the text. The search is not repeated.
  const unclosed = new Set();
  let from = 0;
  const take = (begin, end, nodes) => {
    if (begin > from) parts.push(...leaves(source.slice(from, begin), style));
    parts.push(...nodes);
    from = end;
    return end;
  };
  for (let at = 0; at < text.length;) {
    const found = construct(source, at, style, depth, unclosed);
    at = found ? take(at, found.end, found.nodes) : at + 1;
  }
  take(text.length, text.length, []);
  return parts;
}

function leaves(source, style) {
  const parts = [];
  source.lines().forEach((line, number) => {
    if (number) parts.push("\n", el("br"));
    if (line.length) parts.push(...style.leaf(line));
  });
  return parts;
}

function construct(source, at, style, depth, unclosed) {
  const text = source.text;
  switch (text[at]) {
    case "\\": return escaped(source, at, style, unclosed);
    case "`": return code(source, at, style, unclosed);
    case "$": return dollars(source, at, style, unclosed);
    case "!": return text[at + 1] === "[" ? bracket(source, at + 1, at, style, depth) : null;
    case "[": return bracket(source, at, at, style, depth);
    case "<": return angle(source, at, style);
    case "*": case "_": case "~": return emphasis(source, at, style, depth, unclosed);
    case "h": case "H": return bare(source, at, style);
    default: return null;
  }
}

function escaped(source, at, style, unclosed) {
  const next = source.text[at + 1];
  if (next === "(" || next === "[") {
    const close = next === "(" ? "\\)" : "\\]";
    const end = closing(source.text, close, at + 2, unclosed);
    if (end > 0 && !style.asSource) return { end: end + 2, nodes: [formula(source.text.slice(at + 2, end), next === "[")] };
  }
  if (next === undefined || !ESCAPED.test(next)) return null;
  return { end: at + 2, nodes: style.leaf(source.slice(at + 1, at + 2)) };
}

function closing(text, mark, from, unclosed) {
  if (unclosed.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) unclosed.add(mark);
  return end;
}

function code(source, at, style, unclosed) {
  const ticks = source.text.slice(at).match(/^`{1,32}/)[0];
  const end = closing(source.text, ticks, at + ticks.length, unclosed);
  if (end < 0 || end === at + ticks.length) return { end: at + ticks.length, nodes: style.leaf(source.slice(at, at + ticks.length)) };
  return { end: end + ticks.length, nodes: [el("code", {}, style.leaf(source.slice(at + ticks.length, end)))] };
}

/** `$…$` is a formula unless the dollars look like amounts of money. */
function dollars(source, at, style, unclosed) {
  const text = source.text;
  const mark = text[at + 1] === "$" ? "$$" : "$";
  const begin = at + mark.length;
  if (style.asSource || /\s/.test(text[begin] ?? " ")) return null;
  const end = closing(text, mark, begin, unclosed);
  if (end <= begin || /\s/.test(text[end - 1]) || (mark === "$" && (/\d/.test(text[end + 1] ?? "") || text.slice(begin, end).includes("\n")))) return null;
  return { end: end + mark.length, nodes: [formula(text.slice(begin, end), mark === "$$")] };
}

/** `[text](address "title")` and `![text](address)`, which is a link: the page loads no image. */
function bracket(source, at, begin, style, depth) {
  const text = source.text;
  let level = 0, end = -1;
  for (let place = at; place < Math.min(text.length, at + LABEL); place += 1) {
    if (text[place] === "\\") place += 1;
    else if (text[place] === "[") level += 1;
    else if (text[place] === "]" && --level === 0) { end = place; break; }
  }
  if (end < 0 || text[end + 1] !== "(") return null;
  let close = -1;
  level = 0;
  for (let place = end + 1; place < Math.min(text.length, end + 2 * LABEL); place += 1) {
    if (text[place] === "(") level += 1;
    else if (text[place] === ")" && --level === 0) { close = place; break; }
  }
  if (close < 0) return null;
  const address = text.slice(end + 2, close).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  const label = inline(source.slice(at + 1, end), { ...style, inLink: true }, depth + 1);
  const image = begin < at;
  const nodes = image && !label.length ? ["image"] : label;
  return { end: close + 1, nodes: style.inLink ? nodes : link(address, nodes) };
}

function angle(source, at, style) {
  const found = source.text.slice(at, at + 2 * LABEL).match(/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i);
  if (!found || style.inLink) return null;
  return { end: at + found[0].length, nodes: link(found[1], style.leaf(source.slice(at + 1, at + 1 + found[1].length))) };
}

function bare(source, at, style) {
  if (style.inLink || /\w/.test(source.text[at - 1] ?? "")) return null;
  BARE.lastIndex = at;
  const found = source.text.match(BARE);
  if (!found) return null;
  return { end: at + found[0].length, nodes: link(found[0], style.leaf(source.slice(at, at + found[0].length))) };
}

function emphasis(source, at, style, depth, unclosed) {
  const text = source.text;
  for (const [mark, outer, inner] of MARKS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const begin = at + mark.length;
    const within = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
    if (within || /\s/.test(text[begin] ?? " ") || text[begin] === mark[0]) continue;
    const end = closingMark(text, mark, begin);
    if (end < 0) { unclosed.add(mark); continue; }
    const nodes = inline(source.slice(begin, end), style, depth + 1);
    return { end: end + mark.length, nodes: [el(outer, {}, inner ? el(inner, {}, nodes) : nodes)] };
  }
  const run = text.slice(at).match(/^[*_~]{1,32}/)[0];
  return { end: at + run.length, nodes: style.leaf(source.slice(at, at + run.length)) };
}

function closingMark(text, mark, begin) {
  for (let end = text.indexOf(mark, begin); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1])) continue;
    // A single mark does not close at a double mark: the double mark is another emphasis.
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) {
      while (text[end + 1] === mark) end += 1;
      continue;
    }
    if (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "")) continue;
    return mark.length === 2 && text[end + 2] === mark[0] && text[end + 3] !== mark[0] ? end + 1 : end;
  }
  return -1;
}
