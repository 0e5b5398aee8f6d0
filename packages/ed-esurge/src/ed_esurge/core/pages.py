"""Page tables of running sequences: a pool for each group of layers, and the prefix cache.

Layers with full attention (group "full") keep a page until its sequence ends. Layers with a sliding
window free the pages behind the window, so they form a group with a separate pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ed_esurge.core.page_pool import PagePool, pages_of_sequence
from ed_esurge.core.plan import Moves
from ed_esurge.core.prefix_cache import PrefixCache
from ed_esurge.core.request import Request
from ed_esurge.core.state_store import StateStore

FREED = -1
"""Page table entry of a freed page behind the window."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A group of layers with a common page pool.

    Attributes:
        num_pages: number of pages in the pool.
        window: number of tokens that a query attends to, including its own; None = all previous.
    """

    num_pages: int
    window: int | None = None


class PageTables:
    """Allocates pages to sequences and frees them.

    Args:
        groups: groups by name; empty for a model with only recurrent layers.
        page_size: number of tokens in a page.
        at_once: maximum number of tokens of a sequence in one step.
        prefix_caching: whether equal prefixes share pages.
        host_places: number of evicted pages of each group that host memory keeps.
        states: saved states of recurrent layers; None = the model has none.
    """

    def __init__(
        self,
        groups: Mapping[str, PageGroup],
        page_size: int,
        at_once: int,
        *,
        prefix_caching: bool,
        host_places: int = 0,
        states: StateStore | None = None,
    ) -> None:
        self.page_size, self.at_once, self.states = page_size, at_once, states
        self.windows = {name: g.window for name, g in groups.items() if g.window is not None}
        self.prefixes: PrefixCache | None = None
        if prefix_caching and (groups or states is not None):
            # A query at position p reads the window - 1 tokens before it.
            needed = {
                name: None if g.window is None else -(-(g.window - 1) // page_size)
                for name, g in groups.items()
            }
            self.prefixes = PrefixCache(page_size, needed, host_places, states)
        prefixes = self.prefixes
        self._copies: dict[str, list[tuple[int, int]]] = {}
        self.pools = {
            name: PagePool(
                group.num_pages,
                on_reuse=partial(self._forget_page, name) if prefixes is not None else None,
            )
            for name, group in groups.items()
        }
        self._worth_keeping = {
            name: partial(prefixes.knows, name) if prefixes is not None else None for name in groups
        }

    @property
    def usage(self) -> float:
        """Used fraction of the fullest pool, 0 … 1."""
        return max((pool.usage for pool in self.pools.values()), default=0.0)

    def attach_prefix(self, request: Request) -> int | None:
        """Assign the pages of the longest cached prefix to a request without pages.

        Returns:
            the number of tokens copied from host memory; None if a pool has too few free pages.
        """
        request.pages = {name: [] for name in self.pools}
        if self.prefixes is None or not request.reads_prefixes:
            return 0
        count, matched = self.prefixes.match(request)
        for name, cached_pages in matched.items():
            there = [page for page in cached_pages if isinstance(page, int)]
            self.pools[name].hold(there)
            request.pages[name] = there
        brought = 0
        for name, cached_pages in matched.items():
            keys = [key for key in cached_pages if isinstance(key, bytes)]
            pages = self._bring_back(name, keys) if keys else {}
            if pages is None:
                return None
            brought = max(brought, len(keys))
            request.pages[name] = [
                FREED if page is None else page if isinstance(page, int) else pages[page]
                for page in cached_pages
            ]
        request.num_computed = count * self.page_size
        return brought * self.page_size

    def _bring_back(self, group: str, keys: Sequence[bytes]) -> dict[bytes, int] | None:
        """Allocate device pages for pages in host memory and schedule the copies.

        Returns:
            key -> new device page; None if the pool has too few free pages.
        """
        assert self.prefixes is not None, "nothing is known without it"
        host = self.prefixes.host[group]
        places = host.take(keys)
        pages = self.pools[group].allocate(len(keys))
        if pages is None:
            host.put_back(keys, places)
            return None
        host.load(keys, places, pages)
        for key, page in zip(keys, pages, strict=True):
            self.prefixes.put(group, key, page)
        return dict(zip(keys, pages, strict=True))

    def fork(self, parent: Request, child: Request) -> bool:
        """Give the computed tokens of a running sequence to a new one.

        Both hold the full pages. The last page is copied on the device before the next step.

        Returns:
            False, without changes, if a pool has too few free pages.
        """
        full, inside = divmod(parent.num_computed, self.page_size)
        new: dict[str, list[int]] = {}
        for name, pool in self.pools.items():
            pages = pool.allocate(1) if inside else []
            if pages is None:
                for group_name, new_pages in new.items():
                    self.pools[group_name].release(new_pages)
                return False
            new[name] = pages
        for name, pages in new.items():
            shared = parent.pages[name][:full]
            self.pools[name].hold([page for page in shared if page != FREED])
            if pages:
                copied = (parent.pages[name][full], pages[0])
                self._copies.setdefault(name, []).append(copied)
            child.pages[name] = [*shared, *pages]
        child.num_computed = parent.num_computed
        return True

    def take_copies(self) -> dict[str, list[tuple[int, int]]]:
        """Return and clear the copies of pages required before the next step."""
        copies, self._copies = self._copies, {}
        return copies

    def take_moves(self) -> Moves:
        """Return and clear the copies required before the next step. The caller must do them."""
        moves = {}
        for name, host in self.prefixes.host.items() if self.prefixes is not None else ():
            if host.saves or host.loads:
                moves[name] = host.saves, host.loads
                host.forget_moves()
        return moves

    def hold_out(
        self, lengths: Sequence[tuple[Request, int]], other_requests: Sequence[Request]
    ) -> bool:
        """Return whether requests can grow to the given lengths with the free pages and the pages
        of `other_requests`."""
        for name, pool in self.pools.items():
            window, missing = self.windows.get(name), 0
            for request, length in lengths:
                pages = request.pages[name]
                if window is None:
                    missing += max(0, -(-length // self.page_size) - len(pages))
                else:
                    most = pages_of_sequence(window, length, self.at_once, self.page_size)
                    missing += max(0, most - len(pages) + pages.count(FREED))
            if missing > pool.num_free + sum(
                [len(other_request.pages[name]) for other_request in other_requests]
            ):
                return False
        return True

    def reserve(self, request: Request, count: int) -> dict[str, list[int]] | None:
        """Allocate pages for `count` more tokens of a request.

        Returns:
            the new pages by group, or None, without changes, if a pool has too few free pages.
        """
        if self.windows:
            self._free_behind(request)
        total = -(-(request.num_computed + count) // self.page_size)
        if total <= min([len(held_pages) for held_pages in request.pages.values()], default=total):
            return {}
        new: dict[str, list[int]] = {}
        for name, held_pages in request.pages.items():
            needed = total - len(held_pages)
            if needed <= 0:
                continue
            pages = self.pools[name].allocate(needed)
            if pages is None:
                for group_name, new_pages in new.items():
                    self.pools[group_name].release(new_pages)
                return None
            new[name] = pages
        for name, pages in new.items():
            request.pages[name] += pages
        return new

    def give_back(self, request: Request, new: Mapping[str, Sequence[int]]) -> None:
        """Undo the last `reserve` of a request.

        Args:
            new: value of `reserve`.
        """
        for name, pages in new.items():
            del request.pages[name][len(request.pages[name]) - len(pages) :]
            self.pools[name].release(pages)

    def share(self, request: Request, start: int, stop: int) -> None:
        """Add the pages that a row fills to the prefix cache.

        Other rows of the same step may already use these pages: on the device, every layer writes
        the keys and values of all tokens before it reads any.
        """
        if self.prefixes is not None:
            self.prefixes.insert(request, start, stop)

    def release(self, request: Request) -> None:
        """Free all pages of a request."""
        for name, pages in request.pages.items():
            held_pages = [page for page in pages if page != FREED]
            self.pools[name].release(held_pages, keep=self._worth_keeping[name])
        request.pages = {}
        request.num_computed = 0

    def forget_prefixes(self) -> None:
        """Clear the prefix cache after a change of the weights."""
        if self.prefixes is not None:
            self.prefixes.clear()
            if self.states is not None:
                self.states.clear()
            for pool in self.pools.values():
                pool.forget_kept()

    def _forget_page(self, group: str, page: int) -> None:
        """Remove a page that will be overwritten from the prefix cache, with its state."""
        assert self.prefixes is not None, "only cached pages are forgotten"
        key = self.prefixes.forget(group, page)
        is_read = self.prefixes.needed[group] != 0
        if self.states is not None and key is not None and is_read:
            self.states.discard(key)

    def _free_behind(self, request: Request) -> None:
        for name, window in self.windows.items():
            pages = request.pages[name]
            index = min((request.num_computed - window + 1) // self.page_size, len(pages)) - 1
            freed = []
            while index >= 0 and pages[index] != FREED:
                freed.append(pages[index])
                pages[index] = FREED
                index -= 1
            self.pools[name].release(reversed(freed), keep=self._worth_keeping[name])
