// A subset of Markdown as elements: paragraphs, lists, headings, code.
function prose(text) {
  const parts = [];
  let lines = [], code = null;
  const flush = () => { parts.push(...blocks(lines)); lines = []; };
  for (const line of text.split("\n")) {
    const fence = line.match(/^\s*```(.*)$/);
    if (fence && code === null) {
      flush();
      code = { language: fence[1].trim(), lines: [] };
    } else if (fence) {
      parts.push(codeBlock(code));
      code = null;
    } else (code?.lines ?? lines).push(line);
  }
  if (code !== null) parts.push(codeBlock(code));
  flush();
  return parts;
}

function codeBlock({ language, lines }) {
  const text = lines.join("\n");
  const button = el("button", { type: "button", className: "text", onclick: (event) => copy(text, event.currentTarget) }, "Copy");
  return el("div", { className: "code" },
    el("div", { className: "bar" }, language || "code", button),
    el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function blocks(lines) {
  const parts = [];
  let open = null; // the element that the next line can continue
  const begin = (kind, node) => { parts.push(node); open = { kind, node }; return node; };
  for (const line of lines) {
    const heading = line.match(/^#{1,6}\s+(.*)$/);
    const item = line.match(/^\s*(?:[-*•]|(\d+)[.)])\s+(.*)$/);
    if (!line.trim()) open = null;
    else if (heading) { parts.push(el("h3", {}, inline(heading[1]))); open = null; }
    else if (item) {
      const kind = item[1] ? "ol" : "ul";
      const list = open?.kind === kind ? open.node : begin(kind, el(kind, kind === "ol" ? { start: +item[1] } : {}));
      list.append(el("li", {}, inline(item[2])));
    } else if (open?.kind === "p") open.node.append("\n", el("br"), ...inline(line));
    else if (open) open.node.lastChild.append(" ", ...inline(line.trim()));
    else begin("p", el("p", {}, inline(line)));
  }
  return parts;
}

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(/`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*/g)) {
    parts.push(text.slice(at, found.index));
    if (found[1] !== undefined) parts.push(el("code", {}, found[1]));
    else if (found[2] !== undefined) parts.push(el("strong", {}, found[2]));
    else parts.push(el("em", {}, found[3]));
    at = found.index + found[0].length;
  }
  parts.push(text.slice(at));
  return parts;
}
