// Tokens of answers: texts, bytes and probabilities.

/** Return the tokens of a chunk of either endpoint: {token, logprob, bytes, top: [[token, logprob], …]}. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      token: one.token, logprob: one.logprob, bytes: one.bytes,
      top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((token, place) => ({
    token, logprob: logprobs.token_logprobs[place], bytes: bytesOf(token),
    top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

export function bytesOf(token) {
  if (!token.startsWith("bytes:")) return [...new TextEncoder().encode(token)];
  return [...token.matchAll(/\\x([0-9a-f]{2})/g)].map((found) => parseInt(found[1], 16));
}

/** Return the texts of tokens. The last of several tokens of one character has the character. */
export function shownTexts(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((one) => decoder.decode(new Uint8Array(one.bytes), { stream: true }));
}

/** Return whether a text is a token such as `<|end|>`. */
export const isMark = (text) => /^<[^\s<>]{1,40}>$/.test(text);
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}
