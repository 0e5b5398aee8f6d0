"""Words of a transcript with their times, from the times of its tokens.

Legend: n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ed_models.speech.transcript import SpokenWord

#: Languages that are written without spaces between words; each character is a word.
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
#: Punctuation that belongs to the next word, and to the word before.
BEFORE, AFTER = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BROKEN = "\ufffd"

#: Text, and the first and last token of a word.
TokenPiece = tuple[str, int, int]


def split_words(
    tokens: Sequence[int],
    times: Sequence[tuple[float, float]],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
) -> tuple[SpokenWord, ...]:
    """Return the words of some tokens of text.

    Args:
        tokens: the tokens, without those of times.
        times: begin and end of each token in seconds.
        decode: `tokens -> text`.
        language: code of the language; None = a language with spaces.
    """
    pieces = _characters(tokens, decode)
    if language not in WITHOUT_SPACES:
        pieces = _join_word_pieces(pieces)
    return tuple(
        SpokenWord(text, times[first][0], times[last][1])
        for text, first, last in _with_punctuation(pieces)
    )


def _characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[TokenPiece]:
    """Return the shortest groups of tokens that contain whole characters."""
    full_text = decode(tokens)
    pieces: list[TokenPiece] = []
    first = length = 0
    for last in range(len(tokens)):
        text = decode(tokens[first : last + 1])
        at = length + text.find(_BROKEN)
        # A replacement character of the whole text is no part of a character.
        if _BROKEN not in text or at >= len(full_text) or full_text[at] == _BROKEN:
            pieces.append((text, first, last))
            length += len(text)
            first = last + 1
    return pieces


def _join_word_pieces(pieces: list[TokenPiece]) -> list[TokenPiece]:
    """Join the groups that continue a word."""
    words: list[TokenPiece] = []
    for text, first, last in pieces:
        if not words or text.startswith(" ") or text.strip() in _PUNCTUATION:
            words.append((text, first, last))
        else:
            words[-1] = words[-1][0] + text, words[-1][1], last
    return words


def _with_punctuation(words: list[TokenPiece]) -> list[TokenPiece]:
    """Join punctuation with the next word, or with the word before."""
    joined: list[TokenPiece] = []
    for text, first, last in reversed(words):
        if joined and text.startswith(" ") and text.strip() in BEFORE:
            joined[-1] = text + joined[-1][0], first, joined[-1][2]
        else:
            joined.append((text, first, last))
    result: list[TokenPiece] = []
    for text, first, last in reversed(joined):
        if result and not result[-1][0].endswith(" ") and text in AFTER:
            result[-1] = result[-1][0] + text, result[-1][1], last
        else:
            result.append((text, first, last))
    return result
