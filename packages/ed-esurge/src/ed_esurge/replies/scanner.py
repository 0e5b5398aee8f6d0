"""Text that arrives in pieces, read by generators.

A reader is a generator that yields where it needs more text. It decides by characters alone, never
by where a piece ends, so any split of a text gives the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Write = Callable[[str], object]

SPACE = re.compile(r"\s*")
# Longest head of a call: a name and what surrounds it.
MAX_HEAD = 512


class Malformed(Exception):
    """The text is not what the format wants."""


class Ended(Exception):
    """The text ended in the middle."""


class Markers:
    """Looks for the first of some strings; of two that begin alike, the longer one counts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({*texts} - {""}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._firsts = frozenset(text[0] for text in self.texts)
        self._longest = max(map(len, self.texts), default=0)

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """`(end of the text before a marker, the marker)`; None where none is complete yet."""
        hit = self._pattern.search(text, at)
        stop = hit.start() if hit else len(text)
        if not ended:
            for place in range(max(at, len(text) - self._longest + 1), min(stop + 1, len(text))):
                if text[place] in self._firsts and self._may_become(text[place:]):
                    return place, None
        return stop, hit[0] if hit else None

    def _may_become(self, rest: str) -> bool:
        return any(len(one) > len(rest) and one.startswith(rest) for one in self.texts)


class Scanner:
    """The text so far, and how far it was read.

    Attributes:
        ended: no more text comes.
        mark: the text is kept from here on, for those who read in vain; None: from `at`.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = False
        self.mark: int | None = None

    def feed(self, piece: str) -> None:
        """Append text, and forget what was read."""
        start = self.at if self.mark is None else self.mark
        self.text = self.text[start:] + piece
        self.at -= start
        if self.mark is not None:
            self.mark = 0

    def since_mark(self) -> str:
        """What was read since the mark."""
        return self.text[self.mark : self.at]

    def more(self) -> Reader[None]:
        """Wait for more text.

        Raises:
            Ended: there is none.
        """
        if self.ended:
            raise Ended
        yield

    def peek(self) -> Reader[str]:
        """The next character."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """What is there of a run of characters (`pattern` matches any prefix of one)."""
        hit = pattern.match(self.text, self.at)
        if hit is None:
            return ""
        self.at = hit.end()
        return hit[0]

    def space(self) -> Reader[None]:
        """Skip white space, to the end if need be."""
        while True:
            self.run(SPACE)
            if self.at < len(self.text) or self.ended:
                return
            yield from self.more()

    def literal(self, *options: str) -> Reader[str | None]:
        """Skip one of some strings, and return which; None: none of them is here."""
        longest = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            whole = max((one for one in options if rest.startswith(one)), key=len, default=None)
            open_ = [one for one in options if len(one) > len(rest) and one.startswith(rest)]
            if self.ended or not open_:
                self.at += len(whole or "")
                return whole
            yield from self.more()

    def expect(self, *options: str) -> Reader[str]:
        """Like `literal`, after white space.

        Raises:
            Malformed: none of them is here.
            Ended: there is no more text.
        """
        yield from self.space()
        yield from self.peek()
        known = yield from self.literal(*options)
        if known is None:
            raise Malformed
        return known

    def until(self, markers: Markers, write: Write) -> Reader[str]:
        """Hand out the text before a marker, skip the marker and return it."""
        while True:
            stop, marker = markers.search(self.text, self.at, self.ended)
            if stop > self.at:
                piece, self.at = self.text[self.at : stop], stop
                write(piece)
            if marker is not None:
                self.at += len(marker)
                return marker
            yield from self.more()

    def head(self, markers: Markers) -> Reader[tuple[str, str]]:
        """`(text, marker)`: a short text before a marker.

        Raises:
            Malformed: it is not short.
        """
        parts: list[str] = []
        size = 0

        def write(piece: str) -> None:
            nonlocal size
            size += len(piece)
            if size > MAX_HEAD:
                self.at -= size - MAX_HEAD  # where it was too long, whatever came with it
                raise Malformed
            parts.append(piece)

        marker = yield from self.until(markers, write)
        return "".join(parts), marker
