"""Saved states of recurrent and convolution layers: the prefix cache without its pages.

A page holds keys and values of its tokens, so any number of pages is a prefix. A state summarizes
all tokens before it. A sequence can continue from a prefix only if the pages *and* the state after
the last of these tokens are stored. This file decides which states are stored. It works so:

**Places.** The arrays of the running sequences' states have further rows, the places. The first
`max_num_seqs` rows are the slots of running sequences. Saving a state copies a slot to a place,
restoring it copies a place to a slot, and a fork copies a slot to a slot. One compiled program
executes all copies of a step (`RecurrentCache.copy_rows`), whatever their number and the lengths of
the sequences. The memory of all places is allocated when the engine starts.

**Keys.** A state is saved only at the end of a page. Its key is the key of that page
(`ed_esurge.core.prefix_cache.page_key`), which identifies the whole prefix: its tokens, images,
adapter and salt. If the pool reuses a page, the state with the key of that page is dropped, because
no sequence can reach it.

**Order of copies.** A plan restores before its step and saves after its step. A place may therefore
be read and overwritten by the same plan. A state is stored under its key when the results of its
step are processed (`commit`), because a step that is planned ahead computes tokens that the host
has not read. A request that needs a state of the planned step waits for the next step (`awaits`).

**Which states.** The scheduler ends a step at each of these positions:

- the last page end of a prompt, from which the next turn or an equal prompt continues;
- the last page end of the tokens that earlier prompts also had. For prompts with the same system
  message, this is the end of the message;
- the last page end of a chunk of a long prompt, if the state before is at least `interval` tokens
  away, for prompts that are changed or preempted;
- each multiple of `spacing` tokens of an output, for the next turn and for a preempted sequence.

**Eviction.** Spare states are evicted first: those of the third kind, the earlier states of an
output, and a state that one request has continued, after that request has saved a later state.
Within both classes the least recently used state is evicted first. A state with a second hit, such
as that of a system message, is no longer spare. A preempted sequence continues from its last stored
state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ed_esurge.core.plan import StateCopies
from ed_esurge.core.prefix_cache import extend_page_keys
from ed_esurge.core.request import Request

#: Number of keys of earlier prompts that are remembered to find where prompts diverge.
KNOWN_KEYS = 2**16


class UncommittedState(NamedTuple):
    """A state that a planned step saves.

    Attributes:
        request: its sequence.
        stop: number of tokens before the state.
        is_spare: whether the state is evicted before others.
    """

    request: Request
    stop: int
    is_spare: bool


class StateStore:
    """Index of the saved states, and the copies of the next plan.

    Args:
        places: number of states that can be stored.
        first: number of slots of running sequences, and the row of the first place.
        page_size: number of tokens in a page.
        spacing: minimum number of tokens between two states of a sequence.
        interval: minimum number of tokens between two states inside of a long prompt. Both are
            rounded up to whole pages.

    Attributes:
        num_evicted: number of states that others replaced, since the start.
    """

    def __init__(
        self, places: int, first: int, page_size: int, *, spacing: int, interval: int
    ) -> None:
        self.places, self._first, self.page_size = places, first, page_size
        self.spacing = -(-spacing // page_size) * page_size
        self.interval = -(-interval // self.spacing) * self.spacing
        self.num_evicted = 0
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        self._spare: OrderedDict[bytes, int] = OrderedDict()
        self._uncommitted: dict[int, UncommittedState] = {}  # by place
        self._planned_keys: set[bytes] = set()
        self._copies: dict[int, int] = {}  # target row -> source row
        self._saves: list[tuple[int, int]] = []
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._hits: dict[bytes, int] = {}  # number of sequences that continued from a state
        self._blank = list(range(first + places - 1, first - 1, -1))

    def __contains__(self, key: object) -> bool:
        return key in self._place_of or key in self._spare

    def __len__(self) -> int:
        return len(self._place_of) + len(self._spare)

    @property
    def usage(self) -> float:
        """Fraction of the places that hold a state, 0 … 1."""
        return len(self) / max(self.places, 1)

    # ---- copies before a step

    def restore(self, request: Request) -> None:
        """Copy the state of a request's cached prefix to its slot, and note where its prompt
        differs from the known prompts. The request has its slot and its cached pages."""
        assert request.slot is not None, "only a running request has a state"
        request.state_stop = stop = request.num_computed
        self._copies.pop(request.slot, None)
        request.restored_state = None
        if stop:
            key = request.page_keys[stop // self.page_size - 1]
            place = self._spare.pop(key) if key in self._spare else self._place_of[key]
            self._place_of[key] = place
            self._place_of.move_to_end(key)
            self._copies[request.slot] = place
            self._hits[key] = self._hits.get(key, 0) + 1
            request.restored_state = key
        if request.num_cached is None:
            keys = request.page_keys[: (len(request.prompt) - 1) // self.page_size]
            request.branch_stop = self._count_known(keys) * self.page_size
            self._remember(keys)

    def fork(self, parent: Request, child: Request) -> None:
        """Copy the state of a running sequence to the slot of a new one."""
        assert child.slot is not None, "the child received a slot"
        assert parent.state_slot is not None, "the parent runs"
        self._copies[child.slot] = self._copies.get(parent.state_slot, parent.state_slot)
        child.state_stop = parent.state_stop

    # ---- copies after a step

    def cut(self, request: Request, count: int) -> int:
        """Return the number of tokens, up to `count`, to compute before a state is saved."""
        start, stop = request.num_computed, request.num_computed + count
        ends = sorted((self._prompt_end(request), request.branch_stop))
        # A chunk that the budget ends loses less than a page.
        for end in (*ends, stop // self.page_size * self.page_size):
            if start < end < stop and self._is_saved_at(request, end) is not None:
                return end - start
        return count

    def save(self, request: Request, stop: int, slot: int | None) -> None:
        """Save the state that a planned row computes, if it is worth a place.

        Args:
            request: sequence of the row.
            stop: position after the last token of the row.
            slot: slot of the state after the row.
        """
        is_spare = self._is_saved_at(request, stop)
        if is_spare is None or slot is None:
            return
        index = stop // self.page_size
        if stop <= request.num_tokens:
            extend_page_keys(request, index, self.page_size)
            key = request.page_keys[index - 1]
            if key in self._planned_keys:
                return  # another row of the same step computes the same state
        place = self._allocate()
        if place is None:
            return
        if stop <= request.num_tokens:
            self._planned_keys.add(request.page_keys[index - 1])
        request.state_stop = stop
        self._uncommitted[place] = UncommittedState(request, stop, is_spare)
        self._saves.append((slot, place))

    def awaits(self, request: Request) -> bool:
        """Return whether the planned step saves a state from which the request can continue with
        fewer tokens than it can now."""
        if not self._planned_keys or not request.reads_prefixes:
            return False
        most = (request.num_tokens - 1) // self.page_size
        keys = request.page_keys[request.num_computed // self.page_size : most]
        return not self._planned_keys.isdisjoint(keys)

    def count_steps(self, starts: Iterable[int], most: int) -> int:
        """Return the number of decode steps of one program: up to the next state to save.

        Args:
            starts: number of computed tokens of each sequence.
            most: maximum number of steps.
        """
        if not self.places:
            return most
        return min(most, self.spacing - max(start % self.spacing for start in starts))

    def take(self) -> tuple[StateCopies, StateCopies]:
        """Return and clear the copies before and after the planned step: (source, target)."""
        copies, saves = self._copies, tuple(self._saves)
        self._copies, self._saves = {}, []
        self._planned_keys.clear()
        before: list[tuple[int, int]] = []
        while copies:
            # A slot that another copy reads is overwritten after that copy.
            sources = set(copies.values())
            ready = [target for target in copies if target not in sources]
            assert ready, f"the copies {copies} of states form a circle"
            before += [(copies.pop(target), target) for target in ready]
        return tuple(before), saves

    def commit(self, saves: StateCopies) -> None:
        """Store the states that a step has saved, under their keys.

        Args:
            saves: the copies after the step, whose tokens the sequences have received. A state
                after a token that its sequence did not keep is dropped.
        """
        for _, place in saves:
            state = self._uncommitted.pop(place, None)
            if state is None:
                continue  # the states were cleared meanwhile
            request, index = state.request, state.stop // self.page_size
            if state.stop < request.num_tokens:
                extend_page_keys(request, index, self.page_size)
                key = request.page_keys[index - 1]
                if key not in self:
                    self._store(key, place, state)
                    continue
            self._blank.append(place)

    # ---- the end of states

    def discard(self, key: bytes) -> None:
        """Drop the state of a page whose contents will be overwritten."""
        self._hits.pop(key, None)
        place = self._place_of.pop(key, None)
        if place is None:
            place = self._spare.pop(key, None)
        if place is not None:
            self._blank.append(place)

    def clear(self) -> None:
        """Drop all states, after a change of the weights. No sequence may run."""
        tables = (self._place_of, self._spare, self._uncommitted, self._copies, self._known)
        for table in (*tables, self._hits):
            table.clear()
        self._saves.clear()
        self._planned_keys.clear()
        self._blank = list(range(self._first + self.places - 1, self._first - 1, -1))

    # ---- parts

    def _prompt_end(self, request: Request) -> int:
        """Return the position of the last page end before the last token of the prompt."""
        return (len(request.prompt) - 1) // self.page_size * self.page_size

    def _is_saved_at(self, request: Request, stop: int) -> bool | None:
        """Return whether a state at a position is spare; None if it is not saved."""
        if stop % self.page_size or not self.places:
            return None
        index = stop // self.page_size
        if index <= len(request.page_keys) and request.page_keys[index - 1] in self:
            return None
        if stop >= len(request.prompt):
            return None if stop % self.spacing else False
        if stop - request.state_stop < self.spacing:
            return None
        if stop in (self._prompt_end(request), request.branch_stop):
            return False
        return True if stop - request.state_stop >= self.interval else None

    def _allocate(self) -> int | None:
        """Return a free place. Evict a state if needed; None if all places are uncommitted."""
        if self._blank:
            return self._blank.pop()
        for table in (self._spare, self._place_of):
            if table:
                self.num_evicted += 1
                key, place = table.popitem(last=False)
                self._hits.pop(key, None)
                return place
        return None

    def _store(self, key: bytes, place: int, state: UncommittedState) -> None:
        (self._spare if state.is_spare else self._place_of)[key] = place
        request = state.request
        if state.is_spare:
            return
        restored, request.restored_state = request.restored_state, None
        if restored is not None and self._hits.get(restored) == 1:
            self._make_spare(restored)
        if state.stop >= len(request.prompt):
            if request.output_state is not None:
                self._make_spare(request.output_state)
            request.output_state = key

    def _make_spare(self, key: bytes) -> None:
        place = self._place_of.pop(key, None)
        if place is not None:
            self._spare[key] = place

    def _count_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))

    def _remember(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > KNOWN_KEYS:
            self._known.popitem(last=False)
