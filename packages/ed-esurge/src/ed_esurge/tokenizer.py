"""Tokenization of prompts, incremental detokenization and stop strings.

Tokens are detokenized incrementally. A token may end in the middle of a character, and a stop
string may begin in one piece of text and end in another. The concatenated pieces equal the text of
all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ed_infra.errors import ConfigError
from tokenizers.decoders import DecodeStream

from ed_esurge.thinking import ThoughtTexts

# Number of context tokens before new tokens, for correct spaces and byte sequences.
CONTEXT = 8
# Number of tokens that are decoded in about a millisecond.
LONG_DECODING = 5_000
# Module of the method `_decode` that only calls the Rust tokenizer.
_USUAL_DECODING = "transformers.tokenization_utils_tokenizers"
# Number of tokens without text after which the tokens are decoded less and less often, so that the
# total time is linear: skipped special tokens, or bytes that never form a character.
LONG_WAIT = 64
BROKEN = "\N{REPLACEMENT CHARACTER}"


class AddedToken(Protocol):
    """A token that was added to a vocabulary."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """The interface of a Hugging Face tokenizer that the engine and the server use."""

    bos_token_id: int | None
    eos_token_id: Any  # an id, or None
    chat_template: object  # Jinja text, or None
    name_or_path: str
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The added tokens by id."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def __call__(
        self, text: str, text_pair: str | None = None, /, **options: bool
    ) -> Mapping[str, Any]:
        """Return a mapping with `input_ids`."""
        ...

    def num_special_tokens_to_add(self) -> int:
        """Return the number of special tokens of a text."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return the ids of all tokens."""
        ...

    def convert_tokens_to_ids(self, tokens: str, /) -> int | None:
        """Return the id of a piece; that of the unknown token, or None, outside the vocabulary."""
        ...

    def convert_ids_to_tokens(self, ids: int, /) -> str | None:
        """Return the piece of a token id; None outside the vocabulary."""
        ...

    def decode(
        self, token_ids: object, *, skip_special_tokens: bool = False, **options: object
    ) -> Any:
        """Return the text of token ids."""
        ...

    def apply_chat_template(self, conversation: object, **options: object) -> Any:
        """Return a conversation as text."""
        ...


class Detokenizer:
    """Detokenizes one completion incrementally.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: token ids before the completion; the output excludes their text.
        skip_special_tokens: whether to omit special tokens from the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._rust: Any = getattr(tokenizer, "_tokenizer", None)
        self._ids = list(prompt[-CONTEXT:])
        self._done = len(self._ids)
        self._stream = self._new_stream() if self._rust is not None else None
        self._next_decode = LONG_WAIT + 1  # in tokens without text

    def push(self, token: int) -> str:
        """Append a token and return the new text; "" while a character is incomplete."""
        self._ids.append(token)
        if len(self._ids) - self._done > LONG_WAIT:
            return self._decode_rarely()
        piece = self._step(token) if self._stream is not None else self._whole_characters()
        if piece:
            self._trim()
        return piece or ""

    def _decode_rarely(self) -> str:
        count = len(self._ids) - self._done
        if count < self._next_decode:
            return ""
        self._next_decode = count + count // 8
        piece = self._whole_characters()
        if piece:
            self._trim()
            self._next_decode = LONG_WAIT + 1
            if self._stream is not None:
                self._stream = self._new_stream()
        return piece

    def flush(self) -> str:
        """Return the text of the pending tokens: an incomplete character, as `�`."""
        if self._done == len(self._ids):
            return ""
        piece = self._rest()
        self._trim()
        return piece

    def _step(self, token: int) -> str | None:
        assert self._stream is not None
        try:
            return self._stream.step(self._rust, token)
        except Exception as error:  # the tokenizers library raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            # Some decoders change earlier text after more tokens: restart from here.
            piece = self._whole_characters()
            self._done = len(self._ids) if piece else self._done
            self._stream = self._new_stream()
            return piece

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=list(self._ids), skip_special_tokens=self._skip)

    def _whole_characters(self) -> str:
        piece = self._rest()
        return "" if piece.endswith(BROKEN) else piece

    def _rest(self) -> str:
        delivered_text = self._decode(self._ids[: self._done])
        return self._decode(self._ids)[len(delivered_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )

    def _trim(self) -> None:
        if len(self._ids) > 2 * CONTEXT:
            self._ids = self._ids[-CONTEXT:]
        self._done = len(self._ids)


class StopStringSearch:
    """Searches a stream of text for stop strings, and withholds text that may begin one.

    Args:
        stops: non-empty stop strings.
        include: whether the output includes the matched stop string.
        thoughts: texts around thoughts, in which `stops` are not searched.
        everywhere: stop strings that are also searched within thoughts.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include: bool = False,
        thoughts: ThoughtTexts | None = None,
        everywhere: Sequence[str] = (),
    ) -> None:
        self.stops = (*stops, *everywhere)
        self.include = include
        self.found: str | None = None
        self._held = ""
        self._everywhere = tuple(everywhere)
        self._opens = thoughts.opens if thoughts is not None else ()
        self._closes = thoughts.closes if thoughts is not None else ()
        self._inside = thoughts is not None and thoughts.inside
        texts = (*self.stops, *self._opens, *self._closes)
        self._searches = {text: _StringSearch(text) for text in texts}
        self._searched = self._inside, True

    def push(self, text: str, *, check: bool = True) -> str:
        """Append text and return the text that can be delivered.

        After a match (`found`), the result is empty.

        Args:
            text: the new text.
            check: whether to search for stop strings; False before `min_tokens`.
        """
        if not self.stops:
            return text
        if self.found is not None:
            return ""
        if (self._inside, check) != self._searched:
            text = self._restart(text)
        self._held += text
        out = ""
        while True:
            stops = self._everywhere if self._inside else self.stops
            stops = stops if check else ()
            turns = self._closes if self._inside else self._opens
            self._searched = self._inside, check
            searches = [self._searches[stop_text] for stop_text in dict.fromkeys((*stops, *turns))]
            first = _find_first(searches, text, len(self._held) - len(text))
            if first is None:
                break
            at, match = first
            if match in stops:
                self.found = match
                out += self._held[: at + len(match) if self.include else at]
                self._held = ""
                return out
            out += self._held[: at + len(match)]
            self._held = self._held[at + len(match) :]
            self._inside = not self._inside
            text = self._restart("")
            self._held = text
        keep = max((search.matched for search in searches), default=0)
        cut = len(self._held) - keep
        out += self._held[:cut]
        self._held = self._held[cut:]
        return out

    def _restart(self, text: str) -> str:
        """Begin all searches again, and return the withheld text with the new text."""
        for search in self._searches.values():
            search.matched = 0
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """Return the withheld text at the end of the stream."""
        out, self._held = self._held, ""
        return out


class _StringSearch:
    """Searches a stream for one string with the table of Knuth, Morris and Pratt. The total time is
    linear in the stream.

    Attributes:
        matched: length of the longest suffix of the stream that begins the string.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._table = [0, 0]  # length of a prefix -> its longest proper suffix that is a prefix

    def feed(self, piece: str) -> int:
        """Append a piece of the stream, and return the end of the first match in the piece; -1
        without a match."""
        text, matched, at = self.text, self.matched, 0
        while at < len(piece):
            if not matched:
                at = piece.find(text[0], at)
                if at < 0:
                    break
            elif piece[at] != text[matched]:
                matched = self._shorten(matched)
                continue
            matched += 1
            at += 1
            if matched == len(text):
                return at
        self.matched = matched
        return -1

    def _shorten(self, length: int) -> int:
        """Return the next shorter suffix of a prefix that is a prefix."""
        table, text = self._table, self.text
        while len(table) <= length:
            size = table[-1]
            while size and text[len(table) - 1] != text[size]:
                size = table[size]
            table.append(size + (text[len(table) - 1] == text[size]))
        return table[length]


def _find_first(
    searches: Sequence[_StringSearch], piece: str, offset: int
) -> tuple[int, str] | None:
    """Return the place of the first match and its string; None without a match.

    Args:
        piece: the new text of the stream.
        offset: place of the piece.
    """
    first: tuple[int, str] | None = None
    for search in searches:
        end = search.feed(piece)
        at = offset + end - len(search.text)
        if end >= 0 and (first is None or at < first[0]):
            first = (at, search.text)
    return first


def tokenize_text(
    tokenizer: Tokenizer | None, text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a text."""
    if tokenizer is None:
        raise ConfigError(
            "the engine has no tokenizer: pass one to eSurge(model, tokenizer), or pass token ids"
        )
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def decode_tokens(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the text of tokens. A long text is decoded without the lock of the interpreter."""
    backend = getattr(tokenizer, "_tokenizer", None)
    method = getattr(type(tokenizer), "_decode", None)
    usual = getattr(method, "__module__", None) == _USUAL_DECODING
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    if len(tokens) < LONG_DECODING or backend is None or not usual or cleans:
        return str(tokenizer.decode(tokens))
    return backend.decode_batch([tokens], skip_special_tokens=False)[0]


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, with and without a leading space (as in vLLM)."""
    bare = [word.lstrip(" ") for word in words]
    # A word of spaces only would become empty; other white space ("\n") is the word itself.
    pairs = [(w, " " + w) if w else (word,) for w, word in zip(bare, words, strict=True)]
    texts = [text for pair in pairs for text in pair]
    encodings = [tuple(tokenize_text(tokenizer, text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(ids for ids in encodings if ids))
