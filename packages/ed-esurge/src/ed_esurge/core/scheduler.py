"""Continuous batching: which sequences compute how many tokens in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ed_esurge.core.padding import first_part, room
from ed_esurge.core.pages import PageGroup, PageTables, pages_of_sequence
from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request, Status
from ed_esurge.outputs import FinishReason

# Simulated in too few pages, at most 1.2 tokens are computed for a useful one.
TOKENS_PER_STEP_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold.

    Attributes:
        max_num_seqs: sequences that run at once.
        token_budget: tokens of one step; at least `max_num_seqs`.
        max_model_len: longest sequence.
        chunk: most prompt tokens of one sequence in one step (None: the budget).
        policy: order of the queue.
        shapes: (tokens, sequences) that steps with a prompt are padded to, cheapest first, where
            padding costs as much as tokens do; () = nowhere.
    """

    max_num_seqs: int
    token_budget: int
    max_model_len: int
    chunk: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    shapes: tuple[tuple[int, int], ...] = ()


class Scheduler:
    """Decides, step by step, who runs: `schedule()` → run the plan → `advance(plan, tokens)`.

    There is no prefill phase: each running sequence has tokens that are not computed yet (one when
    it decodes, more before) and gets some of them. Sequences that decode go first, then prompts in
    order, in chunks; then the queue, strictly from its head. The last prompt of a step is cut
    where more steps are padded less (`Limits.shapes`). If a pool runs dry, the last sequence in
    order gives its pages back and is computed anew later ("preempted"); its tokens stay, so it
    goes on where it was.

    Args:
        limits: see `Limits`.
        num_pages: pages of the pool, or name -> pool of each group of layers; a pool must hold one
            sequence of `max_model_len`.
        page_size: tokens of a page.
        prefix_caching: whether equal prefixes share pages. A page does not restore the state of a
            recurrent layer: for a model with such layers, False.
        host_places: pages of each group that host memory keeps when the prefix cache cannot.
        proposer: proposes tokens for sequences that decode; None = nobody does.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        num_pages: int | Mapping[str, PageGroup],
        page_size: int,
        prefix_caching: bool = True,
        host_places: int = 0,
        proposer: Proposer | None = None,
    ) -> None:
        if limits.token_budget < limits.max_num_seqs:
            raise ValueError(
                f"a budget of {limits.token_budget} tokens cannot serve {limits.max_num_seqs} "
                "sequences: each needs one token of a step"
            )
        groups = {"full": PageGroup(num_pages)} if isinstance(num_pages, int) else num_pages
        at_once = min(limits.chunk or limits.token_budget, limits.token_budget)
        for group in groups.values():
            needed = pages_of_sequence(group.window, limits.max_model_len, at_once, page_size)
            if group.num_pages < needed:
                raise ValueError(
                    f"{group.num_pages} pages of {page_size} tokens hold "
                    f"{group.num_pages * page_size} tokens, "
                    f"fewer than max_model_len {limits.max_model_len}: give at least {needed} "
                    "pages or lower max_model_len"
                )
        self.limits = limits
        self.pages = PageTables(
            groups, page_size, at_once, prefix_caching=prefix_caching, host_places=host_places
        )
        self.proposer = proposer
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._step = 0
        self.num_preemptions = 0
        self._usual_output = 0.0
        """Tokens of an output, over the requests that ended lately."""

    # ---- the queue

    def add(self, request: Request) -> None:
        """Queue a request whose id is free and which fits the context: the engine saw to both."""
        name, length = request.request_id, len(request.prompt) + request.max_tokens
        assert name not in self.requests, f"request id {name!r} is in use"
        assert length <= self.limits.max_model_len, (
            f"request {name!r}: {len(request.prompt)} prompt tokens and max_tokens "
            f"{request.max_tokens} exceed max_model_len {self.limits.max_model_len}"
        )
        self.requests[name] = request
        insort(self.waiting, request, key=self._order)

    def finish(self, request_id: str, reason: FinishReason, stop: int | str | None = None) -> bool:
        """End a request from outside (abort, stop string); False if it is not there (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason, request.stop_reason = reason, stop
        self._retire(request)
        return True

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.requests

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute."""
        rows: dict[str, PlanRow] = {}
        started: list[NewSequence] = []
        preempted: list[str] = []
        budget, chunk = self.limits.token_budget, self.limits.chunk
        decoding: list[tuple[Request, int]] = []
        prefilling: list[tuple[Request, int]] = []
        for request in self.running:
            # As `num_tokens` says; every decode of every step comes by here.
            missing = len(request.prompt) + len(request.output) - request.num_computed
            (decoding if missing == 1 else prefilling).append((request, missing))
        last = prefilling[-1][0] if prefilling else None
        for request, missing in decoding + prefilling:
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            count = missing if missing == 1 else min(missing, chunk or missing)
            if count > budget:
                count = budget
            if count <= 0:
                continue
            if request is last:
                count = self._part(request, count, budget, len(rows))
            while (pages := self.pages.reserve(request, count)) is None:
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.request_id)
                undone = rows.pop(victim.request_id, None)
                budget += len(undone.token_ids) if undone is not None else 0
                if victim is request:
                    break
            else:
                rows[request.request_id] = _row(request, count, pages)
                budget -= count
        size = self.pages.page_size
        for row in rows.values():
            stop = row.start + len(row.token_ids)
            if stop // size != row.start // size:  # only whole pages are shared
                self.pages.share(self.requests[row.request_id], row.start, stop)
        # Whoever was just preempted heads the queue: admitting it now would only undo that.
        while self.waiting and budget > 0 and not preempted:
            if len(self.running) >= self.limits.max_num_seqs:
                break
            request = self.waiting[0]
            row = self._admit(request, budget, len(rows))
            if row is None:
                break
            rows[request.request_id] = row
            started.append(_start(request))
            self.pages.share(request, row.start, row.stop)
            budget -= len(row.token_ids)
        if not rows:
            return None
        if self.proposer is not None and not self.waiting:
            total = self.limits.token_budget - budget
            if self.limits.shapes and total > len(rows):
                budget = min(budget, room(self.limits.shapes, total, len(rows)))
            self._speculate(self.proposer, rows, budget)
        self._step += 1
        moves = self.pages.take_moves()
        return StepPlan(self._step, tuple(rows.values()), tuple(started), tuple(preempted), moves)

    def advance(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Take the result of a step.

        Args:
            plan: what was run.
            sampled: request id -> tokens, at least one, for each row that samples. Tokens after
                one that ends the request are dropped.

        Returns:
            request id -> how many tokens it took, for each row that samples or ends its request.
            Those that ended are finished and freed.
        """
        taken: dict[str, int] = {}
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # ended from outside while the step ran
            request.num_computed = row.stop
            if row.samples:
                tokens = sampled[row.request_id]
                taken[row.request_id] = request.take(tokens)
                # Tokens that were proposed in the row and not confirmed are computed anew.
                request.num_computed = min(row.stop, request.num_tokens - 1)
                if row.samples > 1 and self.proposer is not None:
                    self.proposer.count(row.samples - 1, len(tokens) - 1)
                    self.pages.share(request, row.known, request.num_computed)
            elif request.max_tokens == 0 and row.stop == request.num_tokens:
                taken[row.request_id] = 0
                request.finish_reason = "stop" if request.pooled else "length"
            if request.finish_reason is not None:
                self._retire(request)
        if self.proposer is not None:
            self.proposer.observe(plan, self.requests)
        return taken

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, to be computed anew."""
        while self.running:
            self._preempt(self.running[-1])

    # ---- parts

    def _speculate(self, proposer: Proposer, rows: dict[str, PlanRow], budget: int) -> None:
        """Add proposals to rows that decode, as far as rows and tokens of the step are free: each
        proposal is computed in a row of its own."""
        free = min(budget, self.limits.max_num_seqs - len(rows))
        for name, row in rows.items():
            request = self.requests[name]
            left = request.max_tokens - len(request.output) - 1
            most = min(proposer.most, free, left, self.pages.at_once - 1)
            if most <= 0 or row.samples != 1 or len(row.token_ids) != 1 or request.adjusted:
                continue
            proposed = proposer.propose(request, most)
            if not proposed:
                continue
            more = self.pages.reserve(request, 1 + len(proposed))
            if more is None:
                continue
            pages = {group: (*row.pages.get(group, ()), *more[group]) for group in more}
            rows[name] = row._replace(
                token_ids=[*row.token_ids, *proposed],
                pages={**row.pages, **pages},
                samples=1 + len(proposed),
            )
            free -= len(proposed)

    def _order(self, request: Request) -> tuple[int, int]:
        first = request.priority if self.limits.policy == "priority" else 0
        return first, request.arrival

    def _part(self, request: Request, count: int, budget: int, others: int) -> int:
        """Of `count` tokens of a prompt, those that a step with `others` takes: all, unless nobody
        can be admitted behind it, and more steps are padded less."""
        limits = self.limits
        new = request.status is Status.WAITING
        follows = len(self.waiting) > new and len(self.running) + new < limits.max_num_seqs
        if follows or not limits.shapes:
            return count
        return first_part(limits.shapes, limits.token_budget - budget, others + 1, count)

    def _admit(self, request: Request, budget: int, others: int) -> PlanRow | None:
        """Start the head of the queue; None, and no change, if its pages are not there."""
        brought = self.pages.begin(request)
        missing = request.num_tokens - request.num_computed
        count = min(missing, self.limits.chunk or missing, budget)
        count = self._part(request, count, budget, others)
        if (
            brought is None
            or not self._worthwhile(request)
            or self.pages.reserve(request, count) is None
        ):
            self.pages.release(request)
            return None
        if request.num_cached is None:
            request.num_cached = request.num_computed
            if self.pages.prefixes is not None:
                self.pages.prefixes.count(len(request.prompt), request.num_computed, brought)
        self.waiting.pop(0)
        request.status = Status.RUNNING
        request.slot = self._slots.pop()
        insort(self.running, request, key=self._order)
        return _row(request, count, {name: tuple(held) for name, held in request.pages.items()})

    def _worthwhile(self, request: Request) -> bool:
        """Whether the pages last until the tokens of a new sequence have paid for themselves.

        If it ran until the pool is dry, whoever is preempted then has its tokens computed twice. So
        there must be pages for the whole prompt of each, and for some steps of decoding: until half
        the usual length, and more for a sequence that costs more or was preempted before. Those
        that come after it in order would give their pages up. A sequence alone always fits.
        """
        ahead = 1 + request.num_tokens // TOKENS_PER_STEP_AHEAD
        ahead *= 4 ** min(request.num_preemptions, 8)
        usual, place = int(self._usual_output / 2), self._order(request)
        before = [one for one in self.running if self._order(one) < place]
        lengths = []
        for one in (*before, request) if before else ():
            done = len(one.output)
            more = min(max(ahead, usual - done), one.max_tokens - done)
            lengths.append((one, one.num_tokens + more))
        return self.pages.hold_out(lengths, self.running[len(before) :])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self._order)

    def _retire(self, request: Request) -> None:
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._let_go(request)
        request.status = Status.FINISHED
        self._usual_output += (len(request.output) - self._usual_output) / 8
        del self.requests[request.request_id]
        if self.proposer is not None:
            self.proposer.forget(request)

    def _let_go(self, request: Request) -> None:
        self.pages.release(request)
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None


def _row(request: Request, count: int, pages: Mapping[str, Sequence[int]]) -> PlanRow:
    start = request.num_computed
    stop = start + count
    slot = request.slot
    assert slot is not None, "a running request has a slot"
    edge = len(request.prompt)
    if start >= edge and stop == edge + len(request.output):  # a decode, the usual row
        output = request.output
        return PlanRow(request.request_id, slot, start, output[start - edge :], pages, 1)
    return PlanRow(
        request.request_id,
        slot,
        start,
        request.tokens(start, stop),
        pages,
        1 if stop == request.num_tokens and request.max_tokens else 0,
        # Scores leave with the first token: a preempted request is not scored again.
        request.scored and start < len(request.prompt) - 1 and not request.output,
        request.pooled,
    )


def _start(request: Request) -> NewSequence:
    assert request.slot is not None, "a running request has a slot"
    return NewSequence(
        request.request_id,
        request.slot,
        request.tokens(0, request.num_tokens),
        len(request.prompt),
        request.params,
        request.seed,
        request.end_token_ids(),
        request.bad_token_ids,
        request.adapter,
    )
