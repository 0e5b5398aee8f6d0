"""Reference-counted pool of the pages of the key/value cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


def pages_of_sequence(window: int | None, longest: int, at_once: int, page_size: int) -> int:
    """Return the maximum number of pages of a group that one sequence holds.

    Args:
        window: see `ed_esurge.core.pages.PageGroup`.
        longest: maximum length of a sequence in tokens.
        at_once: maximum number of tokens of a sequence in one step.
        page_size: number of tokens in a page.
    """
    most = -(-longest // page_size)
    if window is None:
        return most
    # The tokens of a step and the window of the first token, starting anywhere in a page.
    return min(most, -(-(window - 2 + at_once) // page_size) + 1)


class PagePool:
    """`num_pages` pages, each held by any number of sequences.

    A page without holders is free. A free page may still have cached contents (in the prefix
    cache). Such pages are allocated last, least recently used first, after a call of `on_reuse`.

    Args:
        num_pages: number of pages.
        on_reuse: callback for a page whose contents will be overwritten.
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
        """Number of pages that `allocate` can return."""
        return len(self._blank) + len(self._kept)

    @property
    def usage(self) -> float:
        """Used fraction of the pool, 0 … 1."""
        return 1.0 - self.num_free / self.num_pages

    def holders(self, page: int) -> int:
        """Return the number of sequences that hold a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages with one holder each. Return None, without changes, if fewer pages
        are free."""
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
        """Add one holder to pages. They may be free pages with cached contents."""
        for page in pages:
            if self._holders[page] == 0:
                # Only kept pages are in the prefix cache; a blank page has no contents.
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int], keep: Callable[[int], bool] | None = None) -> None:
        """Remove one holder from pages.

        Args:
            pages: pages in order of position. They are freed from last to first, so that the end of
                a prefix is overwritten before its beginning.
            keep: function that returns whether the contents of a free page are cached.
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
        """Mark all kept pages as blank, after a change of the weights."""
        self._blank.extend(self._kept)
        self._kept.clear()
