"""Incremental scanning of text with generators.

A reader is a generator that yields when it needs more text. Its decisions depend only on the
characters, so the result does not depend on the boundaries of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Write = Callable[[str], object]

_SPACE = re.compile(r"\s*")
# Maximum length of the head of a call: a name and its surrounding text.
MAX_HEAD = 512


class Malformed(Exception):
    """The text violates the format."""


class Ended(Exception):
    """The text ended too early."""


class Markers:
    """Searches for the first of several strings. The longest match at a position wins."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({*texts} - {""}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._firsts = frozenset(text[0] for text in self.texts)
        self._longest = max(map(len, self.texts), default=0)

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Return `(end of the text before a marker, the marker)`, or None without a complete
        marker."""
        hit = self._pattern.search(text, at)
        stop = hit.start() if hit else len(text)
        if not ended:
            for place in range(max(at, len(text) - self._longest + 1), min(stop + 1, len(text))):
                if text[place] in self._firsts and self._may_become(text[place:]):
                    return place, None
        return stop, hit[0] if hit else None

    def _may_become(self, prefix: str) -> bool:
        return any(len(one) > len(prefix) and one.startswith(prefix) for one in self.texts)


class Scanner:
    """The received text and the read position.

    Attributes:
        ended: whether the text is complete.
        discarded: number of characters before `text` that are no longer stored.
        mark: start of the text to keep for backtracking; None: `at`.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = False
        self.discarded = 0
        self.mark: int | None = None

    def feed(self, piece: str) -> None:
        """Append text and discard the consumed text."""
        start = self.at if self.mark is None else self.mark
        text, self.text = self.text[start:], ""
        text += piece  # in place, because no attribute refers to the text
        self.text = text
        self.at -= start
        self.discarded += start
        if self.mark is not None:
            self.mark = 0

    @property
    def position(self) -> int:
        """The read position in the whole text."""
        return self.discarded + self.at

    def since_mark(self) -> str:
        """Return the text between the mark and the read position."""
        return self.text[self.mark : self.at]

    def more(self) -> Reader[None]:
        """Wait for more text.

        Raises:
            Ended: the text has ended.
        """
        if self.ended:
            raise Ended
        yield

    def peek(self) -> Reader[str]:
        """Return the next character without consuming it."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Consume and return the available part of a run of characters.

        Args:
            pattern: pattern that matches any prefix of a run.
        """
        hit = pattern.match(self.text, self.at)
        if hit is None:
            return ""
        self.at = hit.end()
        return hit[0]

    def space(self) -> Reader[None]:
        """Skip white space, possibly up to the end of the text."""
        while True:
            self.run(_SPACE)
            if self.at < len(self.text) or self.ended:
                return
            yield from self.more()

    def literal(self, *options: str) -> Reader[str | None]:
        """Skip one of several strings and return the string; None without a match."""
        longest = max(map(len, options), default=0)
        while True:
            lookahead = self.text[self.at : self.at + longest]
            matching_option = max(
                (one for one in options if lookahead.startswith(one)), key=len, default=None
            )
            open_ = [
                one for one in options if len(one) > len(lookahead) and one.startswith(lookahead)
            ]
            if self.ended or not open_:
                self.at += len(matching_option or "")
                return matching_option
            yield from self.more()

    def expect(self, *options: str) -> Reader[str]:
        """Like `literal`, after white space.

        Raises:
            Malformed: none of the strings matches.
            Ended: the text has ended.
        """
        yield from self.space()
        yield from self.peek()
        matching_option = yield from self.literal(*options)
        if matching_option is None:
            raise Malformed
        return matching_option

    def until(self, markers: Markers, write: Write) -> Reader[str]:
        """Emit the text before a marker, skip the marker and return the marker."""
        while True:
            stop, marker = markers.search(self.text, self.at, self.ended)
            if stop > self.at:
                piece, self.at = self.text[self.at : stop], stop
                write(piece)
            if marker is not None:
                self.at += len(marker)
                return marker
            yield from self.more()

    def until_before(self, markers: Markers) -> Reader[str]:
        """Skip the text before a marker and return the marker, which is not consumed."""
        marker = yield from self.until(markers, lambda text: None)
        self.at -= len(marker)
        return marker

    def head(self, markers: Markers) -> Reader[tuple[str, str]]:
        """Return `(text, marker)` for a short text before a marker.

        Raises:
            Malformed: the text is too long.
        """
        parts: list[str] = []
        size = 0

        def write(piece: str) -> None:
            nonlocal size
            size += len(piece)
            if size > MAX_HEAD:
                self.at -= size - MAX_HEAD  # independent of the boundaries of the pieces
                raise Malformed
            parts.append(piece)

        marker = yield from self.until(markers, write)
        return "".join(parts), marker
