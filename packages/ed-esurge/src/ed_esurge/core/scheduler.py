"""Continuous batching: which sequences compute how many tokens in the next step.

`plan_ahead` plans a step whose input tokens the host has not read: the device inserts them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ed_esurge.core.drafts import DraftPlanner
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.core.encoder_slots import EncoderSlots
from ed_esurge.core.padding import first_part, get_room
from ed_esurge.core.page_pool import pages_of_sequence
from ed_esurge.core.pages import PageGroup, PageTables
from ed_esurge.core.plan import UNREAD, NewSequence, PlanRow, StepPlan
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request, Status
from ed_esurge.core.state_store import StateStore
from ed_esurge.core.step_time import ONE_STEP, StepTime
from ed_esurge.outputs import FinishReason

# In simulations with too few pages, this value limits the computed tokens to 1.2 per useful token.
TOKENS_PER_STEP_AHEAD = 16


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        token_budget: maximum number of tokens in one step; at least `max_num_seqs`.
        max_model_len: maximum length of a sequence.
        chunk: maximum number of prompt tokens of one sequence in one step (None: the budget).
        policy: order of the queue.
        shapes: (tokens, sequences) shapes that steps with a prompt are padded to, cheapest first,
            if a padding token costs as much as a real token; () otherwise.
        whole_prompts: whether each prompt is computed in one step. The budget must fit
            `max_model_len`.
        time: estimated time of a decode step, which limits the steps of one program.
        max_rows: maximum number of sequences and proposed tokens in one step; None =
            `max_num_seqs`.
    """

    max_num_seqs: int
    token_budget: int
    max_model_len: int
    chunk: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    shapes: tuple[tuple[int, int], ...] = ()
    whole_prompts: bool = False
    time: StepTime = ONE_STEP
    max_rows: int | None = None


class Scheduler:
    """Plans the steps: `schedule()` → run the plan → `advance(plan, tokens)`.

    There is no separate prefill phase. Each running sequence has uncomputed tokens (one when it
    decodes, more before), and a step computes some of them. Decoding sequences are scheduled first,
    then running prompts in order, in chunks, then the queue in strict order. The last prompt of a
    step is split if several steps need less padding (`StepLimits.shapes`).

    If a pool has no free page, the last sequence in order is preempted: its pages are freed and
    recomputed later. A preempted sequence keeps its tokens and resumes from them.

    Args:
        limits: see `StepLimits`.
        num_pages: number of pages of the pool, or name -> pool of each group of layers. A pool must
            fit one sequence of `max_model_len`.
        page_size: number of tokens in a page.
        prefix_caching: whether equal prefixes share pages. Must be False for a model whose prompt
            tokens attend to later ones, and for a model with recurrent layers without `states`.
        host_places: number of evicted pages of each group that host memory keeps.
        proposer: source of proposed tokens for decoding sequences; None = no speculation.
        encoder: encoder outputs; None = the model has no encoder.
        states: saved states of recurrent layers; None = the model has none, or prefixes are not
            shared.
        second_states: see `DraftPlanner`; only with a proposer.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        num_pages: int | Mapping[str, PageGroup],
        page_size: int,
        prefix_caching: bool = True,
        host_places: int = 0,
        proposer: Proposer | None = None,
        encoder: EncoderCache | EncoderSlots | None = None,
        states: StateStore | None = None,
        second_states: int | None = None,
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
        self.limits = self._limits_now = limits
        self.pages = PageTables(
            groups,
            page_size,
            at_once,
            prefix_caching=prefix_caching,
            host_places=host_places,
            states=states,
        )
        self.encoder, self.states, self._second_states = encoder, states, second_states
        self.proposer = proposer
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        # Sequences that run since a fork, and have had no row yet.
        self._forked: dict[str, Request] = {}
        # A page does not contain what a proposer or an encoder needs, and copies between device and
        # host memory of the same step would have to be ordered.
        self._shares = prefix_caching and proposer is None and encoder is None and not host_places
        self._step = 0
        self.num_preemptions = 0
        self._usual_output = 0.0
        """Moving average of the output length of finished requests, in tokens."""

    def narrow(self, limits: StepLimits | None) -> None:
        """Plan smaller steps for a time.

        Args:
            limits: limits with a smaller token budget or other shapes; None = `self.limits`.
        """
        self._limits_now = self.limits if limits is None else limits

    @property
    def proposer(self) -> Proposer | None:
        """Source of proposed tokens; None = no speculation."""
        return None if self.drafts is None else self.drafts.proposer

    @proposer.setter
    def proposer(self, proposer: Proposer | None) -> None:
        self.drafts = (
            None
            if proposer is None
            else DraftPlanner(proposer, self.pages, self.states, self._second_states)
        )

    # ---- the queue

    def add(self, request: Request) -> None:
        """Queue a request. The engine has checked that its id is free and that it fits."""
        name, length = request.request_id, len(request.prompt) + request.max_tokens
        assert name not in self.requests, f"request id {name!r} is in use"
        assert length <= self.limits.max_model_len, (
            f"request {name!r}: {len(request.prompt)} prompt tokens and max_tokens "
            f"{request.max_tokens} exceed max_model_len {self.limits.max_model_len}"
        )
        self.requests[name] = request
        insort(self.waiting, request, key=self._order)

    def fork(self, parent: Request, child: Request) -> None:
        """Add a sequence that has the computed tokens of another, and one more token.

        The child runs with the pages of a running parent if a slot and pages are free. Otherwise
        it waits, as a preempted sequence does.
        """
        self.requests[child.request_id] = child
        ready = self._shares and parent.status is Status.RUNNING and bool(self._slots)
        if ready and self.pages.fork(parent, child):
            child.status, child.slot = Status.RUNNING, self._slots.pop()
            child.state_slot = child.slot
            if self.states is not None:
                self.states.fork(parent, child)
            insort(self.running, child, key=self._order)
            self._forked[child.request_id] = child
        else:
            insort(self.waiting, child, key=self._order)

    def finish(self, request_id: str, reason: FinishReason, stop: int | str | None = None) -> bool:
        """Finish a request (abort, stop string). Return False if the id is unknown or finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason, request.stop_reason = reason, stop
        self._retire(request)
        return True

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.requests

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if there is nothing to compute."""
        rows: dict[str, PlanRow] = {}
        started: list[NewSequence] = []
        preempted: list[str] = []
        budget, chunk = self._limits_now.token_budget, self._limits_now.chunk
        if self.encoder is not None:
            self.encoder.begin_step()
        drafts = self.drafts
        decoding: list[tuple[Request, int]] = []
        prefilling: list[tuple[Request, int]] = []
        for request in self.running:
            # `num_tokens` inlined, because this line runs for every sequence in every step.
            missing = len(request.prompt) + len(request.output) - request.num_computed
            if not missing:
                continue  # a beam that waits for the other beams
            decodes = missing == 1 or (
                drafts is not None and drafts.computes_again(request, missing)
            )
            (decoding if decodes else prefilling).append((request, missing))
        last = prefilling[-1][0] if prefilling else None
        for request, missing in decoding + prefilling:
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier sequence
            count = missing if missing == 1 else min(missing, chunk or missing)
            if count > budget:
                count = budget
            if self.encoder is not None and request.num_computed < len(request.prompt):
                count = self.encoder.admit(request, count)
            if count <= 0:
                continue
            if missing > 1:
                count = self._cut(request, count)
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
                rows[request.request_id] = self._row(request, count, pages)
                budget -= count
        size = self.pages.page_size
        for row in rows.values():
            stop = row.start + len(row.token_ids)
            if stop // size != row.start // size:  # only full pages are shared
                request = self.requests[row.request_id]
                if not (row.samples and drafts is not None and drafts.shares_later(request)):
                    self.pages.share(request, row.start, stop)
                if self.states is not None and not row.samples:
                    self.states.save(request, stop, request.state_slot)
        # A preempted request is first in the queue. Admitting it here would undo the preemption.
        while self.waiting and budget > 0 and not preempted:
            if len(self.running) >= self.limits.max_num_seqs:
                break
            request = self.waiting[0]
            row = self._admit(request, budget, len(rows))
            if row is None:
                break
            rows[request.request_id] = row
            started.append(request.start())
            self.pages.share(request, row.start, row.stop)
            if self.states is not None and not row.samples:
                self.states.save(request, row.stop, request.state_slot)
            budget -= len(row.token_ids)
        if not rows:
            # Beams that wait may hold the slots or pages of a queued sequence.
            idle = [one for one in self.running if one.num_computed == one.num_tokens]
            if not self.waiting or not idle:
                return None
            self._preempt(idle[-1])
            return self.schedule()
        for request in [one for name, one in self._forked.items() if name in rows]:
            pages_by_group = {name: tuple(pages) for name, pages in request.pages.items()}
            rows[request.request_id] = rows[request.request_id]._replace(pages=pages_by_group)
            started.append(request.start())
            del self._forked[request.request_id]
        if drafts is not None:
            if not self.waiting:
                total = self._limits_now.token_budget - budget
                if self._limits_now.shapes and total > len(rows):
                    budget = min(budget, get_room(self._limits_now.shapes, total, len(rows)))
                free_rows = (self.limits.max_rows or self.limits.max_num_seqs) - len(rows)
                drafts.add_proposals(rows, self.requests, budget=budget, free_rows=free_rows)
                drafts.reserve_drafts(rows, self.requests)
            drafts.place_states(rows, self.requests)
        steps = 1
        if self._limits_now.time.most > 1 and not self.waiting and not preempted:
            steps = self.reserve_steps(rows, 0)
        self.save_states(rows.values(), steps)
        restores, saves = ((), ()) if self.states is None else self.states.take()
        self._step += 1
        return StepPlan(
            self._step,
            tuple(rows.values()),
            tuple(started),
            tuple(preempted),
            self.pages.take_moves(),
            items=() if self.encoder is None else self.encoder.take_items(),
            copies=self.pages.take_copies(),
            restores=restores,
            saves=saves,
            steps=steps,
        )

    def advance(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Process the results of a step. Finished requests are retired and their pages freed.

        Args:
            plan: the plan of the step.
            sampled: request id -> tokens, at least one, for each row that samples. Tokens after
                the end of a request are dropped.

        Returns:
            request id -> number of appended tokens, for each row that samples or ends its request.
        """
        token_counts: dict[str, int] = {}
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # aborted or stopped while the step ran
            request.num_computed = stop = row.stop + plan.steps - 1
            if self.encoder is not None and row.features:
                self.encoder.release(request, computed=row.stop)
            if row.samples and not request.branches:  # a beam search appends the tokens
                tokens = sampled[row.request_id]
                token_counts[row.request_id] = request.take(tokens)
                # The positions of rejected proposals are recomputed.
                request.num_computed = min(stop, request.num_tokens - 1)
                if plan.steps > 1 or plan.ahead:
                    self.pages.share(request, row.start, request.num_computed)
                if self.drafts is not None:
                    self.drafts.settle(request, row, tokens, token_counts[row.request_id])
            elif request.max_tokens == 0 and row.stop == request.num_tokens:
                token_counts[row.request_id] = 0
                request.finish_reason = "stop" if request.pooled else "length"
            if request.finish_reason is not None:
                self._retire(request)
        if self.states is not None:
            self.states.commit(plan.saves)
        if self.proposer is not None:
            self.proposer.observe(plan, self.requests)
        return token_counts

    def preempt_all(self) -> None:
        """Preempt every running sequence."""
        while self.running:
            self._preempt(self.running[-1])

    def forget_cached(self) -> None:
        """Clear the prefix cache and the encoder outputs. No sequence may run."""
        self.pages.forget_prefixes()
        if self.encoder is not None:
            self.encoder.clear()

    def reserve_steps(self, rows: dict[str, PlanRow], num_unread: int) -> int:
        """Choose the number of decode steps of a plan and reserve the pages of their tokens.

        Args:
            rows: the rows of all running sequences, which receive the pages.
            num_unread: number of sampled tokens that the scheduler has not read.

        Returns:
            the number of steps; 0 if the pools have too few pages for one step.
        """
        steps, time = 1, self._limits_now.time
        requests = [self.requests[name] for name in rows]
        has_all_rows = len(rows) == len(self.running) or num_unread
        if has_all_rows and time.most > 1 and all(map(is_decode, requests, rows.values())):
            most = min([one.max_tokens - len(one.output) for one in requests]) - num_unread
            steps = time.steps(len(rows), sum([row.start for row in rows.values()]))
            steps = max(1, min(steps, most))
            if self.states is not None:
                steps = self.states.count_steps([row.start for row in rows.values()], steps)
        if steps == 1 and not num_unread:
            return 1  # the rows have their pages
        if self.pages.windows:  # their pools hold this number of tokens beside a window
            unread = [
                row.start - one.num_computed
                for one, row in zip(requests, rows.values(), strict=True)
            ]
            steps = min(steps, self.pages.at_once - max(unread))
        while steps > 0:
            new_pages = dict[str, dict[str, list[int]]]()
            for request, (name, row) in zip(requests, rows.items(), strict=True):
                new = self.pages.reserve(request, row.stop + steps - 1 - request.num_computed)
                if new is None:
                    break
                new_pages[name] = new
            else:
                for name, new in new_pages.items():
                    if new:
                        rows[name] = rows[name].append_pages(new)
                return steps
            for name, new in new_pages.items():
                self.pages.give_back(self.requests[name], new)
            steps //= 2
        return 0

    def save_states(self, rows: Iterable[PlanRow], steps: int) -> None:
        """Save the states of rows that sample, if they are worth it.

        Args:
            rows: rows of a plan.
            steps: number of decode steps of the plan.
        """
        if self.states is not None:
            for row in rows:
                if row.samples:
                    request = self.requests[row.request_id]
                    slot = request.state_slot if row.states is None else row.states[1]
                    self.states.save(request, row.stop + steps - 1, slot)

    # ---- parts

    def _row(self, request: Request, count: int, pages: Mapping[str, Sequence[int]]) -> PlanRow:
        if self.encoder is None or not request.encoder_inputs:
            return request.row(count, pages)
        start = request.num_computed
        return request.row(count, pages, self.encoder.index(request, start, start + count))

    def _order(self, request: Request) -> tuple[int, int]:
        first = request.priority if self.limits.policy == "priority" else 0
        return first, request.arrival

    def _part(self, request: Request, count: int, budget: int, num_rows: int) -> int:
        """Return how many of a prompt's `count` tokens to schedule in a step with `num_rows` rows.

        The result is `count` if another request can be admitted after this one. Otherwise the
        prompt is split if several steps need less padding.
        """
        limits = self._limits_now
        new = request.status is Status.WAITING
        follows = len(self.waiting) > new and len(self.running) + new < limits.max_num_seqs
        if follows or not limits.shapes:
            return count
        part = first_part(limits.shapes, limits.token_budget - budget, num_rows + 1, count)
        if isinstance(self.encoder, EncoderCache):
            part = self.encoder.uncut(request, part)
        return part or count

    def _cut(self, request: Request, count: int) -> int:
        """Return how many of a prompt's next `count` tokens to schedule, so that the step ends
        where a state is saved."""
        if self.states is None:
            return count
        part = self.states.cut(request, count)
        if part < count and isinstance(self.encoder, EncoderCache):
            part = self.encoder.uncut(request, part)
        return part or count

    def _admit(self, request: Request, budget: int, num_rows: int) -> PlanRow | None:
        """Admit the first request of the queue. Return None, without changes, if pages are
        missing."""
        brought = self.pages.attach_prefix(request)
        missing = request.num_tokens - request.num_computed
        count = min(missing, self.limits.chunk or missing, budget)
        if self.encoder is not None:
            count = self.encoder.admit(request, count)
        count = self._cut(request, count) if count else 0
        count = self._part(request, count, budget, num_rows) if count else 0
        if (
            brought is None
            or (self.states is not None and self.states.awaits(request))
            or not count
            or (self.limits.whole_prompts and count < missing)
            or not self._worthwhile(request)
            or self.pages.reserve(request, count) is None
        ):
            self._let_go(request)
            return None
        self.waiting.pop(0)
        request.status = Status.RUNNING
        request.slot = request.state_slot = self._slots.pop()
        if self.states is not None:
            self.states.restore(request)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            if self.pages.prefixes is not None:
                self.pages.prefixes.count(len(request.prompt), request.num_computed, brought)
        insort(self.running, request, key=self._order)
        pages = {name: tuple(page_list) for name, page_list in request.pages.items()}
        return self._row(request, count, pages)

    def _worthwhile(self, request: Request) -> bool:
        """Return whether admitting the sequence avoids an early preemption.

        A preempted sequence computes its tokens twice. Admission therefore requires pages for the
        prompts of all sequences before it in order, and for a number of decode steps. That number
        reaches half of the usual output length. It is larger for a long or previously preempted
        sequence. Sequences after it in order count as pages that preemption can free. A sequence
        with no sequence before it is always admitted.
        """
        ahead = 1 + request.num_tokens // TOKENS_PER_STEP_AHEAD
        ahead *= 4 ** min(request.num_preemptions, 8)
        usual, place = int(self._usual_output / 2), self._order(request)
        earlier_requests = [one for one in self.running if self._order(one) < place]
        lengths = []
        for one in (*earlier_requests, request) if earlier_requests else ():
            done = len(one.output)
            more = min(max(ahead, usual - done), one.max_tokens - done)
            lengths.append((one, one.num_tokens + more))
        return self.pages.hold_out(lengths, self.running[len(earlier_requests) :])

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
            self.proposer.release(request)

    def _let_go(self, request: Request) -> None:
        self.pages.release(request)
        self._forked.pop(request.request_id, None)
        if self.encoder is not None:
            self.encoder.release(request)
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = request.state_slot = None


def is_decode(request: Request, row: PlanRow) -> bool:
    """Return whether a row is a decode step that can follow others in one program."""
    is_plain_row = (
        row.samples == 1 and len(row.token_ids) == 1 and not row.scores and not row.features
    )
    return is_plain_row and not request.single_step


def plan_ahead(plan: StepPlan, scheduler: Scheduler) -> StepPlan | None:
    """Plan further tokens for every sequence of a running step.

    If an unread token ends a sequence, its row in the new step is wasted. The pages of such a
    sequence are safe: only later steps reuse them.

    Args:
        plan: the running step; `advance` has not processed its results.

    Returns:
        the plan, or None if the next step needs the scheduler: a request waits, a prompt is
        incomplete, the pools have too few pages, or the plan depends on the sampled tokens.
    """
    if scheduler.waiting or scheduler.proposer is not None:
        return None
    if len(plan.rows) != len(scheduler.running):
        return None
    rows: dict[str, PlanRow] = {}
    for row in plan.rows:
        request = scheduler.requests.get(row.request_id)
        if request is None or request.tracked or row.samples != 1:
            return None
        # Otherwise the running step ends the request.
        if len(request.output) + plan.steps < request.max_tokens:
            start = row.stop + plan.steps - 1
            rows[row.request_id] = PlanRow(row.request_id, row.slot, start, UNREAD, {}, 1)
    steps = scheduler.reserve_steps(rows, plan.steps) if rows else 0
    if not steps:
        return None
    scheduler.save_states(rows.values(), steps)
    restores, saves = ((), ()) if scheduler.states is None else scheduler.states.take()
    return StepPlan(
        plan.step,
        tuple(rows.values()),
        moves=scheduler.pages.take_moves(),
        ahead=True,
        restores=restores,
        saves=saves,
        steps=steps,
    )
