"""Texts of users inside of a chat template: the template reads them without marks, and writes them
with marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex


class MarkedText(str):
    """A text with marked characters.

    Methods that templates call read the plain text, and return parts that keep their marks. Every
    other use, such as the output of the template, reads the marked text.

    Args:
        plain_text: the text without marks.
        places: positions of the marked characters, ascending.
        mark: function that returns the marked form of a character.
    """

    _plain_text: str
    _places: tuple[int, ...]
    _mark: Callable[[str], str]

    def __new__(
        cls, plain_text: str, places: Sequence[int], mark: Callable[[str], str]
    ) -> MarkedText:
        pieces, at = [], 0
        for place in places:
            pieces += [plain_text[at:place], mark(plain_text[place])]
            at = place + 1
        self = super().__new__(cls, "".join([*pieces, plain_text[at:]]))
        self._plain_text, self._places, self._mark = plain_text, tuple(places), mark
        return self

    def _part(self, start: int, end: int) -> MarkedText:
        places = [place - start for place in self._places if start <= place < end]
        return MarkedText(self._plain_text[start:end], places, self._mark)

    def __str__(self) -> str:
        return str.__str__(self)

    def __len__(self) -> int:
        return len(self._plain_text)

    def __bool__(self) -> bool:
        return bool(self._plain_text)

    def __eq__(self, other: object) -> bool:
        return self._plain_text == _read_plain(other)

    def __ne__(self, other: object) -> bool:
        return self._plain_text != _read_plain(other)

    def __hash__(self) -> int:
        return hash(self._plain_text)

    def __contains__(self, text: object) -> bool:
        return _read_plain(text) in self._plain_text

    def __iter__(self) -> Iterator[MarkedText]:
        return (self._part(place, place + 1) for place in range(len(self._plain_text)))

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        places = range(len(self._plain_text))[key]
        if isinstance(places, int):
            return self._part(places, places + 1)
        if places.step == 1:
            return self._part(places.start, max(places.start, places.stop))
        order = {place: index for index, place in enumerate(places)}
        marked_places = sorted(order[place] for place in self._places if place in order)
        return MarkedText(self._plain_text[key], marked_places, self._mark)

    def __add__(self, other: str) -> MarkedText:
        more = [len(self._plain_text) + place for place in _read_places(other)]
        return MarkedText(self._plain_text + _read_plain(other), [*self._places, *more], self._mark)

    def __radd__(self, other: str) -> MarkedText:
        places = [len(_read_plain(other)) + place for place in self._places]
        return MarkedText(
            _read_plain(other) + self._plain_text, [*_read_places(other), *places], self._mark
        )

    def strip(self, chars: str | None = None) -> MarkedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> MarkedText:
        return self._part(
            len(self._plain_text) - len(self._plain_text.lstrip(_read_plain(chars))),
            len(self._plain_text),
        )

    def rstrip(self, chars: str | None = None) -> MarkedText:
        return self._part(0, len(self._plain_text.rstrip(_read_plain(chars))))

    def removeprefix(self, prefix: str) -> MarkedText:
        return self[
            len(self._plain_text) - len(self._plain_text.removeprefix(_read_plain(prefix))) :
        ]

    def removesuffix(self, suffix: str) -> MarkedText:
        return self._part(0, len(self._plain_text.removesuffix(_read_plain(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [*self._locate(self._plain_text.split(_read_plain(sep), maxsplit), sep)]

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [*self._locate(self._plain_text.rsplit(_read_plain(sep), maxsplit), sep)]

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, at = list[str](), 0
        for line in self._plain_text.splitlines(keepends=True):
            length = len(line) if keepends else len(line.splitlines()[0])
            lines.append(self._part(at, at + length))
            at += len(line)
        return lines

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._divide(self._plain_text.partition(_read_plain(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._divide(self._plain_text.rpartition(_read_plain(sep)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        first, *pieces = self._locate(self._plain_text.split(_read_plain(old), count), old)
        plains, places, at = [first._plain_text], [*first._places], len(first._plain_text)
        for piece in pieces:
            for part in (new, piece):
                places += [at + place for place in _read_places(part)]
                plains.append(_read_plain(part))
                at += len(plains[-1])
        return MarkedText("".join(plains), places, self._mark)

    def startswith(self, prefix: str | tuple[str, ...], *span: SupportsIndex | None) -> bool:
        return self._plain_text.startswith(_read_plain(prefix), *span)

    def endswith(self, suffix: str | tuple[str, ...], *span: SupportsIndex | None) -> bool:
        return self._plain_text.endswith(_read_plain(suffix), *span)

    def find(self, text: str, *span: SupportsIndex | None) -> int:
        return self._plain_text.find(_read_plain(text), *span)

    def rfind(self, text: str, *span: SupportsIndex | None) -> int:
        return self._plain_text.rfind(_read_plain(text), *span)

    def index(self, text: str, *span: SupportsIndex | None) -> int:
        return self._plain_text.index(_read_plain(text), *span)

    def rindex(self, text: str, *span: SupportsIndex | None) -> int:
        return self._plain_text.rindex(_read_plain(text), *span)

    def count(self, text: str, *span: SupportsIndex | None) -> int:
        return self._plain_text.count(_read_plain(text), *span)

    def isspace(self) -> bool:
        return self._plain_text.isspace()

    def _locate(self, pieces: Sequence[str], sep: str | None) -> list[MarkedText]:
        """Return pieces that separators divide; None = white space."""
        result, at = [], 0
        for piece in pieces:
            start = self._plain_text.index(piece, at) if sep is None else at
            at = start + len(piece)
            result.append(self._part(start, at))
            at += 0 if sep is None else len(sep)
        return result

    def _divide(self, parts: Sequence[str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        total_length = len(self._plain_text)
        return self._part(0, first), self._part(first, second), self._part(second, total_length)


def _read_plain(text: object) -> Any:
    if isinstance(text, tuple):
        return tuple(map(_read_plain, text))
    return text._plain_text if isinstance(text, MarkedText) else text


def _read_places(text: str) -> Sequence[int]:
    return text._places if isinstance(text, MarkedText) else ()
