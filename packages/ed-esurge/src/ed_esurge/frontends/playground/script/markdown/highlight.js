// Colors of code: comments, strings, numbers and keywords of common languages.
import { el } from "../dom.js";

const LONGEST = 100000; // characters; longer code has no colors
const words = (text) => new Set(text.split(" "));
const C_WORDS = "auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false float for friend goto if inline int long namespace new nullptr operator private protected public register return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while";
const KEYWORDS = {
  python: words("False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield self"),
  javascript: words("async await break case catch class const continue debugger default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null of private public readonly return static super switch this throw true try type typeof undefined var void while with yield string number boolean"),
  c: words(C_WORDS),
  java: words("abstract assert boolean break byte case catch char class const continue default do double else enum extends false final finally float for if implements import instanceof int interface long new null package private protected public record return short static super switch synchronized this throw throws true try var void while"),
  go: words("break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select string int struct switch true type var error"),
  rust: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while"),
  shell: words("if then else elif fi for in do done while until case esac function return export local echo cd set unset source exit sudo"),
  sql: words("select from where insert into values update set delete create table drop alter join left right inner outer on group by order having limit as and or not null is in like between union all distinct primary key foreign references index case when then else end"),
  json: words("true false null"),
  yaml: words("true false null yes no"),
  css: words("important inherit initial none auto"),
  html: words(""),
};
const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript",
  cpp: "c", "c++": "c", cc: "c", h: "c", hpp: "c", cuda: "c", csharp: "java", cs: "java", kotlin: "java", swift: "java", golang: "go", rs: "rust",
  sh: "shell", bash: "shell", zsh: "shell", console: "shell", yml: "yaml", toml: "yaml", ini: "yaml", jsonc: "json", xml: "html", svg: "html", scss: "css",
};
const STRING = `"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?`;
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][-+]?\\d+)?)\\b";
const WORD = "[A-Za-z_$][\\w$]*";
const rule = (comment, string = STRING) => new RegExp(`(${comment})|(${string})|(${NUMBER})|(${WORD})`, "g");
const HASH = rule("#[^\\n]*");
const SLASHES = rule("\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)", `${STRING}|\`(?:\\\\.|[^\`\\\\])*\`?`);
const RULES = {
  python: rule("#[^\\n]*", `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|${STRING}`),
  shell: HASH, yaml: HASH, sql: rule("--[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)"), html: rule("<!--[\\s\\S]*?(?:-->|$)"),
};
const CLASSES = ["comment", "string", "number"];

/** Return the nodes of a code. Code of an unknown language has no colors. */
export function highlighted(text, language) {
  const name = ALIASES[language] ?? language;
  const keywords = Object.hasOwn(KEYWORDS, name) ? KEYWORDS[name] : null;
  if (!keywords || text.length > LONGEST) return [text];
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(RULES[name] ?? SLASHES)) {
    const word = found[4];
    const known = word !== undefined && (keywords.has(word) || (name === "sql" && keywords.has(word.toLowerCase())));
    const kind = word === undefined ? CLASSES[found.slice(1, 4).findIndex((one) => one !== undefined)] : known ? "keyword" : "";
    if (!kind) continue;
    parts.push(text.slice(at, found.index), el("span", { className: `c-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  parts.push(text.slice(at));
  return parts;
}
