"""Log-probabilities in the formats of OpenAI's two endpoints, with exact token bytes.

A token of a byte-level vocabulary may contain a part of a character, which is not valid text. The
chat endpoint has a field `bytes` for such a token; the completions endpoint writes
`bytes:\\xe2\\x80`.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ed_esurge.outputs import PositionLogprobs
from ed_esurge.server.http.json_parts import JsonItems
from ed_esurge.tokenizer import Tokenizer

# JSON cannot represent -inf. exp(-9999) is zero in float64.
FLOOR = -9999.0


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Return the inverse of GPT-2's table, which maps each byte to a printable letter."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    unprintable_bytes = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + place): byte for place, byte in enumerate(unprintable_bytes)})
    return table


class TokenTexts:
    """Cached bytes and printable texts of tokens.

    Args:
        tokenizer: a Hugging Face tokenizer. Its decoder determines how pieces represent bytes:
            `ByteLevel` (GPT-2's letters), or SentencePiece's `▁` and `<0x0A>`.
        as_ids: whether the texts are the ids of the tokens, `token_id:5`.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        added = tokenizer.added_tokens_decoder
        self._added = set(added)
        self._special = {token for token, added_token in added.items() if added_token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def is_special(self, token: int) -> bool:
        """Return whether decoding omits the token."""
        return token in self._special

    def get_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of the token."""
        token_bytes = self._bytes.get(token)
        if token_bytes is None:
            token_bytes = self._bytes[token] = self._encode_token(token)
        return token_bytes

    def get_text(self, token: int) -> str:
        """Return the text of the token, or `bytes:\\x..` for incomplete characters."""
        if self._as_ids:
            return f"token_id:{token}"
        text = self._texts.get(token)
        if text is None:
            raw = self.get_bytes(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token] = text
        return text

    def _encode_token(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the vocabulary of the model can be larger than the tokenizer's
            return b""
        if token in self._added:
            return piece.encode()
        if self._byte_level:
            letters = _byte_of_letter()
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def _alternatives(position: PositionLogprobs, count: int) -> list[tuple[int, float]]:
    """Return the `count` most probable candidates of one position, best first."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)[:count]
    return [(token, max(entry.logprob, FLOOR)) for token, entry in ranked]


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], top: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of the chat endpoint for some consecutive tokens."""
    return {"content": list(_chat_entries(texts, tokens, logprobs, top)), "refusal": None}


def written_chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], top: int
) -> dict[str, Any]:
    """Return the value of `chat_logprobs`, whose entries are created while they are written."""
    content = JsonItems(lambda: _chat_entries(texts, tokens, logprobs, top))
    return {"content": content, "refusal": None}


def _chat_entries(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], top: int
) -> Iterator[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.get_text(token),
            "logprob": logprob,
            "bytes": list(texts.get_bytes(token)),
        }

    for token, position in zip(tokens, logprobs, strict=True):
        token_entry = entry(token, max(position[token].logprob, FLOOR))
        token_entry["top_logprobs"] = [entry(*pair) for pair in _alternatives(position, top)]
        yield token_entry


def token_probabilities(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], top: int
) -> Iterator[dict[str, Any]]:
    """Yield `completion_probabilities` of llama.cpp: the entries of chats, with token ids."""
    entries = _chat_entries(texts, tokens, logprobs, top)
    for token, position, entry in zip(tokens, logprobs, entries, strict=True):
        entry["id"] = token
        best = _alternatives(position, top)
        for (alternative_token, _), alternative in zip(best, entry["top_logprobs"], strict=True):
            alternative["id"] = alternative_token
        yield entry


def prompt_logprobs(
    texts: TokenTexts, positions: Sequence[PositionLogprobs | None] | None, count: int
) -> JsonItems:
    """Return `prompt_logprobs` in vLLM's format. The entries are created while they are written.

    Each prompt token except the first has the entries of that token and of the `count` most
    probable tokens, by token id.
    """

    def entries(position: PositionLogprobs) -> dict[str, Any]:
        prompt_token = next(iter(position))
        return {
            str(token): {
                "logprob": max(one.logprob, FLOOR),
                "rank": one.rank,
                "decoded_token": texts.get_text(token),
            }
            for token, one in position.items()
            if token == prompt_token or (one.rank or 0) <= count
        }

    position_logprobs = positions or ()
    return JsonItems(lambda: (None if one is None else entries(one) for one in position_logprobs))


class CompletionLogprobs:
    """Writes `choices[].logprobs` of the completions endpoint for consecutive pieces.

    `text_offset` counts characters of the choice's text (with `echo`, of prompt and completion).

    Args:
        top: number of alternatives per position, in addition to the chosen token.
    """

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """Return the part for the prompt. A special token that is not in the text has width 0."""
        part = self._empty()
        for token, position in zip(tokens, logprobs, strict=True):
            token_text = self._texts.get_text(token)
            hidden = self._texts.is_special(token) and not text.startswith(token_text, self._offset)
            self._append(part, token, position, width=0 if hidden else None)
        self._offset = len(text)
        self._utf8.reset()
        return part

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs]
    ) -> dict[str, Any]:
        """Return the part for some consecutive generated tokens."""
        part = self._empty()
        for token, position in zip(tokens, logprobs, strict=True):
            hidden = self._texts.is_special(token)
            self._append(part, token, position, width=0 if hidden else None)
        return part

    @staticmethod
    def _empty() -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _append(
        self,
        part: dict[str, Any],
        token: int,
        position: PositionLogprobs | None,
        width: int | None,
    ) -> None:
        part["tokens"].append(self._texts.get_text(token))
        part["text_offset"].append(self._offset)
        if position is None:  # the first token of a prompt has no log-probability
            part["token_logprobs"].append(None)
            part["top_logprobs"].append(None)
        else:
            token_logprob = max(position[token].logprob, FLOOR)
            part["token_logprobs"].append(token_logprob)
            pairs = [*_alternatives(position, self._top), (token, token_logprob)]
            part["top_logprobs"].append({self._texts.get_text(t): value for t, value in pairs})
        if width is None:
            width = len(self._utf8.decode(self._texts.get_bytes(token)))
        self._offset += width


def join_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate parts of `CompletionLogprobs`, or of `chat_logprobs`."""
    joined: dict[str, Any] = {key: [] for key, value in parts[0].items() if value is not None}
    for part in parts:
        for key, values in joined.items():
            values.extend(part[key])
    return {key: joined.get(key) for key in parts[0]}
