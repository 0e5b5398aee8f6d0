"""Proposals by a small model with the same vocabulary and a separate page pool.

The draft model follows the plans of the served model. Pages with equal numbers in the two pools
belong to the same sequence and prefix. The draft model samples with the noise of the same seed and
position, so that two models with equal probabilities sample the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.drafts import has_drafts
from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.core.proposals import LONGEST_PAUSE, DraftKind, Proposals, Proposer
from ed_esurge.core.request import Request, Status
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.sampling import SamplingParams

#: The group of the served model that shares page numbers with the draft model.
DRAFT_GROUP = "full"


class DraftModel(Proposer):
    """Proposes tokens of a draft model.

    Args:
        runner: runner of the draft model, with the slots, pages and shapes of the served model.
        config: options with `method: draft_model`.
        token_budget: maximum number of tokens in one step.
    """

    repeatable = False

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig, token_budget: int) -> None:
        super().__init__(config.num_speculative_tokens, adapts=config.adaptive_length)
        self.runner, self._budget = runner, token_budget
        self.reserved_tokens = self.most
        self._computed: dict[str, int] = {}  # number of tokens with keys and values
        self._pages: dict[str, list[int]] = {}  # pages not passed to the runner yet
        self._drafts: Proposals = {}
        self._starts: dict[str, NewSequence] = {}  # sequences not started in the runner yet

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer`."""
        length, tokens = self._drafts.get(request.request_id, (0, []))
        return tokens[:most] if length == request.num_tokens else ()

    def proposals(self) -> Proposals:
        """See `Proposer`."""
        return self._drafts

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        for table in (self._computed, self._pages, self._drafts, self._starts):
            table.pop(request.request_id, None)

    def observe(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """Compute the tokens of a step with the draft model, and draft the next tokens."""
        if DRAFT_GROUP in plan.moves:
            self.runner.move({DRAFT_GROUP: plan.moves[DRAFT_GROUP]})
        begun = {new.request_id: new for new in plan.started}
        # `Scheduler.schedule` proposes nothing while requests wait.
        waits = any(request.status is Status.WAITING for request in requests.values())
        rows: list[PlanRow] = []
        budget = self._budget
        for row in plan.rows:
            request = requests.get(row.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue
            if row.request_id in begun:
                self._pages.pop(row.request_id, None)
                self._drafts.pop(row.request_id, None)
                self._starts[row.request_id] = _strip_adjustments(begun[row.request_id])
                self._computed[row.request_id] = row.start
            pages = self._pages.setdefault(row.request_id, [])
            pages += row.pages.get(DRAFT_GROUP, ())
            start, stop, end = self._get_range(request, row)
            stop = min(stop, self._room(request), start + budget)
            if self._can_wait(request, row, range(start, stop)) or stop <= start:
                continue  # process the row later; its pages and its start data are stored
            budget -= stop - start
            remaining_tokens = request.max_tokens - len(request.output)
            wants_draft = row.samples and stop == end and remaining_tokens > 1
            drafts = int(wants_draft and not waits and self._is_useful(request))
            rows.append(self._build_row(request, row, range(start, stop), pages, drafts))
            self._pages[row.request_id] = []
            self._computed[row.request_id] = stop
        if rows:
            names = [row.request_id for row in rows if row.request_id in self._starts]
            started = tuple(self._starts.pop(name) for name in names)
            self._draft(StepPlan(plan.step, tuple(rows), started), requests)

    def _can_wait(self, request: Request, row: PlanRow, places: range) -> bool:
        """Return whether to compute these positions later, because the sequence receives no
        proposals now. A paused draft then costs nothing, and few larger steps later."""
        is_paused = bool(row.samples) and not self._is_useful(request)
        return is_paused and len(places) < LONGEST_PAUSE

    def _get_range(self, request: Request, row: PlanRow) -> tuple[int, int, int]:
        """Return the first position that a row of the served model makes computable, the position
        after the last one, and the position after the last known one."""
        stop = request.num_tokens if row.samples else row.stop
        return self._take_confirmed(request), stop, request.num_tokens

    def _build_row(
        self, request: Request, row: PlanRow, places: range, pages: list[int], samples: int
    ) -> PlanRow:
        """Return the row that computes some positions of a sequence."""
        tokens = request.tokens(places.start, places.stop)
        groups = {DRAFT_GROUP: pages}
        return PlanRow(row.request_id, row.slot, places.start, tokens, groups, samples)

    def _is_useful(self, request: Request) -> bool:
        return has_drafts(request) and self.get_limit(request) > 0

    def _draft(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """Run the rows of a plan, and draft tokens of the sequences whose row samples."""
        limits = {
            row.request_id: self.get_limit(requests[row.request_id])
            for row in plan.rows
            if row.samples
        }
        most = max(limits.values(), default=0)
        for name in limits:
            self._drafts[name] = requests[name].num_tokens, []
        if not most or plan.total > self.runner.buckets.max_rows:  # needs a shape of prompts
            sampled = self._run(plan)
            rows: list[PlanRow] = []
            stop = 0  # of the flat tokens of the plan
            for row in plan.rows:
                stop += len(row.token_ids)
                token = sampled.get(row.request_id, [-1])[0] if row.samples else -1
                if token >= 0:
                    self._drafts[row.request_id][1].append(token)
                    if row.stop < self._room(requests[row.request_id]):
                        rows.append(self._build_next(row, token, stop - 1))
            plan, most = StepPlan(plan.step, tuple(rows)), most - 1
        if not (most and plan.rows):
            return
        lines = [line for row in plan.rows for line in separate_tokens(row)]
        plan = replace(plan, rows=tuple(lines), steps=most)
        names = [row.request_id for row in lines if row.samples]
        rooms = [self._room(requests[name]) for name in names]
        for name, drafts in zip(names, self.runner.draft(plan, rooms), strict=True):
            tokens = self._drafts[name][1]
            tokens += drafts[: limits[name] - len(tokens)]

    def _run(self, plan: StepPlan) -> Mapping[str, Sequence[int]]:
        """Run a plan and return the sampled tokens."""
        return self.runner.run(plan).tokens()

    def _build_next(self, row: PlanRow, token: int, index: int) -> PlanRow:
        """Return the row of a draft.

        Args:
            row: the row that sampled the draft.
            token: the draft.
            index: index of the row's last token among the flat tokens of its plan.
        """
        return PlanRow(row.request_id, row.slot, row.stop, (token,), {}, 1)

    def _take_confirmed(self, request: Request) -> int:
        """Return the number of computed tokens of a request, including accepted drafts."""
        name = request.request_id
        computed = self._computed[name]
        length, tokens = self._drafts.pop(name, (0, []))
        if length == computed:
            # The last draft was sampled, but not computed.
            for token in tokens[:-1]:
                if computed >= request.num_tokens - 1:
                    break
                if request.tokens(computed, computed + 1)[0] != token:
                    break
                computed += 1
        self._computed[name] = computed
        return computed

    def _room(self, request: Request) -> int:
        """Return the number of tokens that fit into the pages of a request."""
        return len(request.pages[DRAFT_GROUP]) * self.runner.page_size

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """See `Proposer`."""
        self.runner.compile_all(progress)

    def free(self) -> None:
        """See `Proposer`."""
        self.runner.free()

    def allocate(self) -> None:
        """See `Proposer`."""
        self.runner.allocate()


def separate_tokens(row: PlanRow) -> list[PlanRow]:
    """Return a row for each token of a row; the last one samples."""
    lines = [
        row._replace(
            start=row.start + index,
            token_ids=(token,),
            pages={} if index else row.pages,
            features=row.features[index : index + 1],
            samples=0,
        )
        for index, token in enumerate(row.token_ids)
    ]
    return [*lines[:-1], lines[-1]._replace(samples=row.samples)]


def _strip_adjustments(new: NewSequence) -> NewSequence:
    """Return a sequence without grammar, adapter and adjustments, which the draft model ignores."""
    params = new.params
    if isinstance(params, SamplingParams):
        option_names = ("temperature", "top_k", "top_p", "min_p")
        params = SamplingParams(**{name: getattr(params, name) for name in option_names})
    return replace(new, params=params, end_token_ids=(), bad_token_ids=(), adapter=0, rules=None)


DRAFT_MODEL_KIND = DraftKind(None, lambda runner, served, *options: DraftModel(runner, *options))
