// Markdown as elements. The text is untrusted: every element and attribute is made here.
import { blocksOf } from "./blocks.js";
import { Source } from "./source.js";

const plain = (source) => [document.createTextNode(source.text)];

/** Return the elements of a Markdown text. `leaf`: a function from a `Source` to its nodes. */
export function prose(text, leaf = null) {
  return blocksOf(Source.of(text).lines(), { leaf: leaf ?? plain, asSource: leaf !== null, depth: 0 });
}
