"""Pages of the key/value cache: who holds each, and which may be given out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """`num_pages` pages, each held by any number of sequences.

    A page that nobody holds is free. A free page may still have useful contents (those of the
    prefix cache): such pages are given out last, the least recently used first, and `on_reuse` is
    called with each.

    Args:
        num_pages: size of the pool.
        on_reuse: called with a page whose contents are about to be overwritten.
    """

    def __init__(self, num_pages: int, on_reuse: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool of {num_pages} pages cannot hold anything: give at least 1")
        self.num_pages = num_pages
        self._on_reuse = on_reuse
        self._holders = [0] * num_pages
        self._blank: list[int] = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._blank) + len(self._kept)

    @property
    def usage(self) -> float:
        """Held part of the pool, 0 … 1."""
        return 1.0 - self.num_free / self.num_pages

    def holders(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free pages, each then held once; None (and no change) if there are fewer."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                if self._on_reuse is not None:
                    self._on_reuse(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Let one more sequence hold pages, which may be free ones with kept contents."""
        for page in pages:
            if self._holders[page] == 0:
                # The prefix cache knows kept pages only; a blank one has no contents.
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int], keep: Callable[[int], bool] | None = None) -> None:
        """Let one holder go of pages.

        Args:
            pages: in order of position. They become free last to first, so that the end of a
                prefix is overwritten before its beginning.
            keep: tells whether the contents of a page that nobody holds any more are of use.
        """
        for page in reversed(list(pages)):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is released but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if keep is not None and keep(page):
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def forget_kept(self) -> None:
        """Make all kept pages blank (their contents no longer fit the weights)."""
        self._blank.extend(self._kept)
        self._kept.clear()
