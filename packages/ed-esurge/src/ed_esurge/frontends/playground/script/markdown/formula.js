// Formulas: a subset of LaTeX as MathML. A formula outside of the subset is shown as its source.
import { el, math } from "../dom.js";
import { ACCENTS, FONTS, FUNCTIONS, inFont, LARGE, LETTERS, LIMITS, OPERATORS, SPACES } from "./symbols.js";

const LONGEST = 4000, DEEPEST = 40;
const FENCES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Bmatrix: ["{", "}"], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], array: ["", ""], gathered: ["", ""], equation: ["", ""], "equation*": ["", ""] };
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "nonumber"]);
const TOKEN = /\\(?:[A-Za-z]+|[\s\S])|[{}^_&~]|\s+|\d+(?:\.\d+)?|[\s\S]/gu;

/** Return the element of a formula. */
export function formula(text, display) {
  const source = () => el("code", { className: "formula" }, text.trim());
  if (text.length > LONGEST) return source();
  try {
    const inner = new Reader(text, display).all();
    return math("math", display ? { display: "block", displaystyle: "true" } : {}, math("mrow", {}, inner));
  } catch {
    return source();
  }
}

/** A reader of tokens. Each method returns MathML elements. */
class Reader {
  constructor(text, display) {
    this.tokens = text.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
    this.display = display;
    this.font = null;
  }

  all() {
    const nodes = this.until(() => false);
    if (this.at < this.tokens.length) throw new Error("a brace is closed too often");
    return nodes;
  }

  peek() {
    while (/^\s+$/.test(this.tokens[this.at] ?? "")) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at += 1;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`${token} is missing`);
  }

  /** Read terms until a token is an end. The end is not read. */
  until(isEnd) {
    const nodes = [];
    for (let token = this.peek(); token !== undefined && token !== "}" && !isEnd(token); token = this.peek()) nodes.push(this.scripted());
    return nodes;
  }

  /** Read a term with its exponent and index. */
  scripted() {
    const limits = this.hasLimits(this.peek());
    const base = this.peek() === "^" || this.peek() === "_" ? math("mrow") : this.term();
    let below = null, above = null;
    for (let token = this.peek(); token === "^" || token === "_" || token === "'"; token = this.peek()) {
      this.next();
      if (token === "'") above = math("mrow", {}, above, math("mo", {}, "′"));
      else if (token === "^") above = above ? math("mrow", {}, above, this.term()) : this.term();
      else if (below) throw new Error("two indices");
      else below = this.term();
    }
    if (!below && !above) return base;
    const tag = (below && above ? (limits ? "munderover" : "msubsup") : below ? (limits ? "munder" : "msub") : limits ? "mover" : "msup");
    return math(tag, {}, base, below, above);
  }

  hasLimits(token) {
    const name = token?.slice(1);
    return this.display && token?.startsWith("\\") && ((Object.hasOwn(LARGE, name) && !name.endsWith("int")) || LIMITS.has(name));
  }

  term() {
    if (++this.depth > DEEPEST) throw new Error("too many levels");
    const node = this.single(this.next());
    this.depth -= 1;
    return node;
  }

  single(token) {
    if (token === undefined) throw new Error("the formula ends too early");
    if (token === "{") {
      const nodes = this.until(() => false);
      this.expect("}");
      return math("mrow", {}, nodes);
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return math("mn", {}, this.font ? [...token].map((one) => inFont(one, this.font)).join("") : token);
    if (/^\p{L}/u.test(token)) return this.letter(token);
    if (token === "~") return math("mspace", { width: ".25em" });
    if (token === "}" || token === "&" || token === "^" || token === "_") throw new Error(`${token} has no place here`);
    return math("mo", "()[]|/".includes(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  letter(token) {
    if (this.font === "normal") return math("mi", { mathvariant: "normal" }, token);
    return math("mi", {}, this.font ? inFont(token, this.font) : token);
  }

  command(name) {
    const own = (table) => Object.hasOwn(table, name) ? table[name] : undefined;
    if (own(LETTERS)) return math("mi", {}, LETTERS[name]);
    if (own(OPERATORS)) return math("mo", /^(?:l|r)(?:angle|ceil|floor|brace)$|vert|mid/i.test(name) ? { stretchy: "false" } : {}, OPERATORS[name]);
    if (own(LARGE)) return math("mo", { largeop: "true", movablelimits: String(!this.display) }, LARGE[name]);
    if (FUNCTIONS.has(name) || LIMITS.has(name)) return math("mi", {}, name);
    if (own(SPACES)) return math("mspace", { width: SPACES[name] });
    if (own(ACCENTS)) return math("mover", { accent: "true" }, this.term(), math("mo", { stretchy: String(name.startsWith("over") || name.startsWith("wide")) }, ACCENTS[name]));
    if (own(FONTS)) return this.inFontOf(FONTS[name]);
    if (IGNORED.has(name)) return math("mrow");
    switch (name) {
      case "frac": case "dfrac": case "tfrac": return math("mfrac", {}, this.term(), this.term());
      case "binom": return math("mrow", {}, math("mo", {}, "("), math("mfrac", { linethickness: "0" }, this.term(), this.term()), math("mo", {}, ")"));
      case "sqrt": return this.root();
      case "text": case "textbf": case "textrm": case "textit": case "mbox": case "operatorname": return this.words(name);
      case "underline": case "boxed": return this.term();
      case "overset": case "underset": return this.over(name === "overset");
      case "underbrace": return math("munder", {}, this.term(), math("mo", { stretchy: "true" }, "⏟"));
      case "overbrace": return math("mover", {}, this.term(), math("mo", { stretchy: "true" }, "⏞"));
      case "left": return this.fenced();
      case "begin": return this.environment();
      case "{": case "}": case "%": case "$": case "#": case "&": case "_": return math("mo", { stretchy: "false" }, name);
      case "|": return math("mo", { stretchy: "false" }, "‖");
      case "\\": return math("mspace", { linebreak: "newline" });
      default: throw new Error(`unknown command ${name}`);
    }
  }

  inFontOf(font) {
    const before = this.font;
    this.font = font;
    const node = this.term();
    this.font = before;
    return node;
  }

  root() {
    if (this.peek() !== "[") return math("msqrt", {}, this.term());
    this.next();
    const index = math("mrow", {}, this.until((token) => token === "]"));
    this.expect("]");
    return math("mroot", {}, this.term(), index);
  }

  over(above) {
    const script = this.term();
    return math(above ? "mover" : "munder", {}, this.term(), script);
  }

  words(name) {
    this.expect("{");
    let text = "", level = 0;
    for (let token = this.tokens[this.at++]; ; token = this.tokens[this.at++]) {
      if (token === undefined) throw new Error("} is missing");
      if (token === "}" && level-- === 0) break;
      if (token === "{") level += 1;
      text += token;
    }
    return math(name === "operatorname" ? "mi" : "mtext", name === "textbf" ? { class: "bold" } : {}, text);
  }

  fence() {
    const token = this.next() ?? "";
    const name = token.replace("\\", "");
    if (name === ".") return "";
    return Object.hasOwn(OPERATORS, name) ? OPERATORS[name] : token === "\\|" ? "‖" : name;
  }

  fenced() {
    const open = this.fence();
    const inner = this.until((token) => token === "\\right");
    this.expect("\\right");
    const close = this.fence();
    const side = (text, form) => text && math("mo", { stretchy: "true", fence: "true", form }, text);
    return math("mrow", {}, side(open, "prefix"), inner, side(close, "postfix"));
  }

  name() {
    this.expect("{");
    let text = "";
    for (let token = this.next(); token !== "}"; token = this.next()) {
      if (token === undefined) throw new Error("} is missing");
      text += token;
    }
    return text;
  }

  environment() {
    const name = this.name();
    if (!Object.hasOwn(FENCES, name)) throw new Error(`unknown environment ${name}`);
    if (name === "array" && this.peek() === "{") this.name();
    const rows = [[]];
    for (let token = this.peek(); token !== "\\end"; token = this.peek()) {
      if (token === undefined) throw new Error("\\end is missing");
      if (token === "\\\\") { this.next(); rows.push([]); continue; }
      if (token === "&" && rows.at(-1).length) this.next();
      else if (token === "&") { this.next(); rows.at(-1).push(math("mtd")); }
      const before = this.at;
      rows.at(-1).push(math("mtd", {}, this.until((one) => one === "&" || one === "\\\\" || one === "\\end")));
      if (this.at === before && this.peek() !== "&" && this.peek() !== "\\\\" && this.peek() !== "\\end") throw new Error("} has no place here");
    }
    this.next();
    if (this.name() !== name) throw new Error("environments are nested wrongly");
    if (!rows.at(-1).length) rows.pop();
    const kind = /align|cases|equation|gathered/.test(name) ? name.replace("*", "") : "matrix";
    const body = math("mtable", { class: `m-${kind}`, displaystyle: String(kind.startsWith("align")) }, rows.map((row) => math("mtr", {}, row)));
    const [open, close] = FENCES[name];
    return math("mrow", {}, open && math("mo", { stretchy: "true", fence: "true", form: "prefix" }, open), body, close && math("mo", { stretchy: "true", fence: "true", form: "postfix" }, close));
  }
}
