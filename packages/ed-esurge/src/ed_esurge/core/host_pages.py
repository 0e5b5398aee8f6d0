"""Which pages lie in host memory: those that the prefix cache gave up, until they are wanted again.

There is one index for each group of layers. The pages themselves are the runner's
(`ed_esurge.runner.host_pages`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class HostPages:
    """Places of host memory, each with the page of one prefix, the least recently used first.

    What must be copied before the next step is noted in `saves` and `loads`. All saves come before
    all loads, because a page that is given up may take another prefix in the same step.

    Args:
        places: how many there are.

    Attributes:
        saves: place -> page of the device that is copied there.
        loads: page of the device -> place that it is copied from.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.saves: dict[int, int] = {}
        self.loads: dict[int, int] = {}
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        self._blank = list(range(places - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def save(self, key: bytes, page: int) -> None:
        """Keep a page whose contents are about to be overwritten, if a place can be had."""
        if self.loads.pop(page, None) is not None:
            return  # it was on its way from here
        if key in self._place_of:
            self._place_of.move_to_end(key)
            return
        place = self._blank.pop() if self._blank else self._oldest()
        if place is not None:
            self._place_of[key] = place
            self.saves[place] = page

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Places of pages that are wanted. Nothing else gets them before `load` or `put_back`."""
        return [self._place_of.pop(key) for key in keys]

    def put_back(self, keys: Sequence[bytes], places: Sequence[int]) -> None:
        """Have the places of `take` again, as those used last."""
        self._place_of.update(zip(keys, places, strict=True))

    def load(self, keys: Sequence[bytes], places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy the pages of `take` to the device; they stay here, too."""
        self.put_back(keys, places)
        self.loads.update(zip(pages, places, strict=True))

    def forget_moves(self) -> None:
        """What was noted is done."""
        self.saves, self.loads = {}, {}

    def clear(self) -> None:
        """Drop all pages (other weights)."""
        self.forget_moves()
        self._place_of.clear()
        self._blank = list(range(self.places - 1, -1, -1))

    def _oldest(self) -> int | None:
        """The place of the least recently used page, which is dropped; None where each is about to
        be read."""
        reading = {*self.loads.values()}
        key = next((key for key, place in self._place_of.items() if place not in reading), None)
        return None if key is None else self._place_of.pop(key)
