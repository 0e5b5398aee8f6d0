// A piece of text that knows the position of each character in the complete text.
// The probability view finds the token of a character by its position.

export class Source {
  constructor(text, places) {
    this.text = text;
    this.places = places;
  }

  static of(text) {
    return new Source(text, Array.from({ length: text.length }, (_, place) => place));
  }

  get length() {
    return this.text.length;
  }

  slice(begin, end) {
    return new Source(this.text.slice(begin, end), this.places.slice(begin, end));
  }

  /** Return the piece without white space at both ends. */
  trim() {
    const begin = this.text.length - this.text.trimStart().length;
    return this.slice(begin, Math.max(begin, this.text.trimEnd().length));
  }

  /** Return the lines, without their ends. */
  lines() {
    const found = [];
    for (let at = 0; at <= this.length;) {
      const end = this.text.indexOf("\n", at);
      found.push(this.slice(at, end < 0 ? this.length : end));
      if (end < 0) break;
      at = end + 1;
    }
    return found;
  }

  /** Join lines. A line end has the position after its line. */
  static joined(lines) {
    const text = [], places = [];
    lines.forEach((line, number) => {
      if (number) {
        text.push("\n");
        places.push((places.at(-1) ?? -1) + 1);
      }
      text.push(line.text);
      for (const place of line.places) places.push(place);
    });
    return new Source(text.join(""), places);
  }
}
