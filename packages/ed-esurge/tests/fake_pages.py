"""A device without jax for tests of the scheduler: pages, states, and a model of one function."""

from __future__ import annotations

import hashlib

from ed_esurge.core.pages import PageGroup
from ed_esurge.core.plan import UNREAD, NewSequence

EOS = 0


def next_token(tokens: list[int]) -> int:
    """Return the next token, a function of the whole prefix, so that lost tokens are detected."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=2).digest()
    return int.from_bytes(digest) % 7


def expected(prompt: list[int], max_tokens: int, *, ends: bool = True) -> list[int]:
    """Return the output of a request that runs alone."""
    out: list[int] = []
    while len(out) < max_tokens:
        out.append(next_token(prompt + out))
        if ends and out[-1] == EOS:
            break
    return out


class FakePages:
    """Contents of the pages on a device, written and read by position.

    The recurrent state of a sequence is the list of all its computed tokens.
    """

    def __init__(
        self, groups: dict[str, PageGroup], size: int, at_once: int, *, recurrent: bool = False
    ):
        self.recurrent = recurrent
        self.groups, self.size, self.at_once = groups, size, at_once
        self.window = groups["window"].window if "window" in groups else None
        self.cells: dict[tuple[str, int, int], int] = {}
        self.slots: dict[int, tuple[NewSequence, dict[str, list[int]]]] = {}
        self.host: dict[tuple[str, int], list[int]] = {}
        self.last: dict[int, int] = {}  # slot -> the token that it sampled last
        self.states: dict[int, list[int]] = {}  # by slot or place

    def move(self, plan) -> None:
        for group, (saves, _) in plan.moves.items():
            for place, page in saves.items():
                self.host[group, place] = [self.cells[group, page, i] for i in range(self.size)]
        for group, (_, loads) in plan.moves.items():
            for page, place in loads.items():
                for i, token in enumerate(self.host[group, place]):
                    self.cells[group, page, i] = token

    def run(self, plan) -> dict[str, list[int]]:
        self.move(plan)
        for source, target in plan.restores:
            self.states[target] = self.states[source]
        for new in plan.started:
            self.slots[new.slot] = (new, {group: [] for group in self.groups})
        sampled = {}
        for row in plan.rows:  # all writes of a step come before its reads
            _, tables = self.slots[row.slot]
            for group, pages in row.pages.items():
                tables[group] += pages
            token_ids = [self.last[row.slot]] if row.token_ids == UNREAD else row.token_ids
            for position, token in enumerate(token_ids, row.start):
                for group, pages in tables.items():
                    page, place = pages[position // self.size], position % self.size
                    assert page >= 0, "written behind the window"
                    self.cells[group, page, place] = token
        for row in plan.rows:
            new, tables = self.slots[row.slot]
            assert new.request_id == row.request_id
            source, target = row.states or (row.slot, row.slot)
            state = self.states.get(source, []) if row.start else []
            token_ids = [self.last[row.slot]] if row.token_ids == UNREAD else row.token_ids
            context = [*state, *token_ids]
            assert not self.recurrent or len(state) == row.start, "the state is of other tokens"
            if "full" in tables:
                context = self.read("full", tables, 0, row.stop)
                assert not self.recurrent or state == context[: row.start], "a stale state"
            if self.window is not None:
                # The query of the row's first token attends to the earliest position.
                seen = max(0, row.start - self.window + 1)
                assert self.read("window", tables, seen, row.stop) == context[seen:]
            self.states[target] = context
            if row.samples > 1:
                ends = range(row.known, row.stop + 1)
                tokens = [next_token(context[:end]) for end in ends]
                sampled[row.request_id] = row.get_accepted_tokens(tokens)
            elif row.samples:
                following = [next_token(context)]
                while len(following) < self.at_once:
                    following.append(next_token(context + following))
                sampled[row.request_id] = following
                self.last[row.slot] = following[-1]
        for source, target in plan.saves:
            self.states[target] = self.states[source]
        return sampled

    def read(self, group, tables, start, stop) -> list[int]:
        pages = tables[group]
        return [
            self.cells[group, pages[position // self.size], position % self.size]
            for position in range(start, stop)
        ]
