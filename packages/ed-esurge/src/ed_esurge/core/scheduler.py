"""Continuous batching: which sequences compute how many tokens in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ed_esurge.core.page_pool import PagePool
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.core.prefix_cache import PrefixCache
from ed_esurge.core.request import Request, Status
from ed_esurge.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold.

    Attributes:
        max_num_seqs: sequences that run at once.
        token_budget: tokens of one step; at least `max_num_seqs`.
        max_model_len: longest sequence.
        chunk: most prompt tokens of one sequence in one step (None: the budget).
        policy: order of the queue.
    """

    max_num_seqs: int
    token_budget: int
    max_model_len: int
    chunk: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"


class Scheduler:
    """Decides, step by step, who runs: `schedule()` → run the plan → `advance(plan, tokens)`.

    There is no prefill phase: each running sequence has tokens that are not computed yet (one when
    it decodes, more before) and gets some of them. Sequences that decode go first, then prompts in
    order, in chunks; then the queue, strictly from its head. If the pool runs dry, the last
    sequence in order gives its pages back and is computed anew later ("preempted"); its tokens
    stay, so it goes on where it was.

    Args:
        limits: see `Limits`.
        num_pages: size of the page pool; it must hold one sequence of `max_model_len`.
        page_size: tokens of a page.
        prefix_caching: whether equal prefixes share pages.
    """

    def __init__(
        self, limits: Limits, *, num_pages: int, page_size: int, prefix_caching: bool = True
    ) -> None:
        if limits.token_budget < limits.max_num_seqs:
            raise ValueError(
                f"a budget of {limits.token_budget} tokens cannot serve {limits.max_num_seqs} "
                "sequences: each needs one token of a step"
            )
        needed = -(-limits.max_model_len // page_size)
        if num_pages < needed:
            raise ValueError(
                f"{num_pages} pages of {page_size} tokens hold {num_pages * page_size} tokens, "
                f"fewer than max_model_len {limits.max_model_len}: give at least {needed} pages "
                "or lower max_model_len"
            )
        self.limits = limits
        self.page_size = page_size
        self.prefix_cache = PrefixCache(page_size) if prefix_caching else None
        forget = self.prefix_cache.forget if self.prefix_cache is not None else None
        self.pool = PagePool(num_pages, on_reuse=forget)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._step = 0
        self.num_preemptions = 0

    # ---- the queue

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or it can never fit the context.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use: choose another")
        longest = len(request.prompt) + request.max_tokens
        if longest > self.limits.max_model_len:
            raise ValueError(
                f"request {request.request_id!r}: {len(request.prompt)} prompt tokens and "
                f"max_tokens {request.max_tokens} exceed max_model_len {self.limits.max_model_len}"
            )
        self.requests[request.request_id] = request
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
        preempted: list[str] = []
        budget = self.limits.token_budget
        decoding = [r for r in self.running if r.num_tokens - r.num_computed == 1]
        prefilling = [r for r in self.running if r.num_tokens - r.num_computed > 1]
        for request in decoding + prefilling:
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            count = min(self._wanted(request), budget)
            if count <= 0:
                continue
            while not self._reserve(request, count):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.request_id)
                undone = rows.pop(victim.request_id, None)
                budget += undone.count if undone is not None else 0
                if victim is request:
                    break
            else:
                rows[request.request_id] = _row(request, count)
                budget -= count
        for row in rows.values():
            self._share(row)
        # Whoever was just preempted heads the queue: admitting it now would only undo that.
        while self.waiting and budget > 0 and not preempted:
            if len(self.running) >= self.limits.max_num_seqs:
                break
            request = self.waiting[0]
            count = self._admit(request, budget)
            if count is None:
                break
            rows[request.request_id] = row = _row(request, count)
            self._share(row)
            budget -= count
        if not rows:
            return None
        self._step += 1
        return StepPlan(self._step, tuple(rows.values()), tuple(preempted))

    def advance(self, plan: StepPlan, sampled: Mapping[str, int]) -> list[Request]:
        """Take the result of a step.

        Args:
            plan: what was run.
            sampled: request id -> token, for each row that samples.

        Returns:
            The requests that got a token; those that ended with it are finished and freed.
        """
        grown = []
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # ended from outside while the step ran
            request.num_computed = row.start + row.count
            if row.samples:
                request.append(sampled[row.request_id])
                grown.append(request)
                if request.finish_reason is not None:
                    self._retire(request)
        return grown

    def forget_prefixes(self) -> None:
        """Drop the prefix cache: the weights are others now."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            self.pool.forget_kept()

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, to be computed anew."""
        while self.running:
            self._preempt(self.running[-1])

    # ---- parts

    def _order(self, request: Request) -> tuple[int, int]:
        first = request.priority if self.limits.policy == "priority" else 0
        return first, request.arrival

    def _wanted(self, request: Request) -> int:
        missing = request.num_tokens - request.num_computed
        chunk = self.limits.chunk
        return missing if chunk is None else min(missing, chunk)

    def _share(self, row: PlanRow) -> None:
        """Let others find the pages that this row fills, in this very step: on the device, every
        layer writes the keys and values of all tokens before any of them reads."""
        if self.prefix_cache is not None:
            request = self.requests[row.request_id]
            self.prefix_cache.insert(request, row.start, row.start + row.count)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _reserve(self, request: Request, count: int) -> bool:
        """Give the request pages for `count` more tokens, if the pool has them."""
        needed = self._pages_for(request.num_computed + count) - len(request.pages)
        if needed <= 0:
            return True
        pages = self.pool.allocate(needed)
        if pages is None:
            return False
        request.pages += pages
        return True

    def _admit(self, request: Request, budget: int) -> int | None:
        """Start the head of the queue; None, and no change, if its pages are not there."""
        if self.prefix_cache is not None and request.params.prompt_logprobs is None:
            request.pages = self.prefix_cache.match(request, self.pool)
            request.num_computed = len(request.pages) * self.page_size
        count = min(self._wanted(request), budget)
        needed = self._pages_for(request.num_computed + count) - len(request.pages)
        # Each running sequence will soon want a page: an admission that leaves none for them only
        # leads to preemption.
        if self.pool.num_free - needed < len(self.running):
            self._drop_pages(request)
            return None
        if not self._reserve(request, count):
            self._drop_pages(request)
            return None
        if request.num_cached is None:
            request.num_cached = request.num_computed
            if self.prefix_cache is not None:
                self.prefix_cache.queries += len(request.prompt)
                self.prefix_cache.hits += request.num_computed
        self.waiting.pop(0)
        request.status = Status.RUNNING
        request.slot = self._slots.pop()
        insort(self.running, request, key=self._order)
        return count

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._drop_pages(request)
        self._drop_slot(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self._order)

    def _retire(self, request: Request) -> None:
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._drop_pages(request)
        self._drop_slot(request)
        request.status = Status.FINISHED
        del self.requests[request.request_id]

    def _drop_pages(self, request: Request) -> None:
        cache = self.prefix_cache
        self.pool.release(request.pages, keep=cache.__contains__ if cache is not None else None)
        request.pages = []
        request.num_computed = 0

    def _drop_slot(self, request: Request) -> None:
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None


def _row(request: Request, count: int) -> PlanRow:
    start = request.num_computed
    return PlanRow(request.request_id, start, count, samples=start + count == request.num_tokens)
