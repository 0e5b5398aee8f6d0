"""`Ledger`: the unfinished requests and their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.core.commands import Add
from ed_esurge.core.plan import PlanRow
from ed_esurge.core.scheduler import Scheduler
from ed_esurge.engine.beams import BeamSearch, params_of_step
from ed_esurge.engine.deltas import OpenRequest
from ed_esurge.engine.intake import derive_seed, get_seeds
from ed_esurge.outputs import CompletionOutput, FinishReason, RequestOutput
from ed_esurge.runner.result import NotFinite, StepResult
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)


class Ledger:
    """Adds the sequences of new requests to a scheduler and converts step results to outputs.

    Args:
        scheduler: scheduler of the sequences.
        tokenizer: tokenizer of the outputs; None produces no text.
        seed: seed of requests without one.

    Attributes:
        arrivals: number of sequences added so far, which is the number of the next sequence.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, seed: int) -> None:
        self.arrivals = 0
        self._scheduler, self._tokenizer, self._seed = scheduler, tokenizer, seed
        self._open: dict[str, OpenRequest] = {}
        self._owner: dict[str, OpenRequest] = {}  # by the id of a sequence
        self._searches: dict[str, BeamSearch] = {}  # by the id of a request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def names(self) -> list[str]:
        """Ids of the requests, in order of arrival."""
        return list(self._open)

    def add(self, add: Add, keep_alive: object = None) -> None:
        """Add a request.

        Args:
            add: the request.
            keep_alive: object to keep alive until the request ends.

        Raises:
            ConfigError: the request id is in use.
        """
        if add.request_id in self._open:
            raise ConfigError(f"request id {add.request_id!r} is in use: choose another")
        seed = derive_seed(add.params, self._seed, self.arrivals)
        seeds = get_seeds(add.params, seed)
        if isinstance(add.params, SamplingParams) and add.params.use_beam_search:
            seeds = seeds[:1]
            beam_add = replace(add, params=params_of_step(add.params))
            opened = OpenRequest.of(beam_add, self.arrivals, seeds, None)
            opened.add, opened.writers = add, {}
            search = BeamSearch(add, *opened.sequences.values(), self._tokenizer)
            opened.sequences = search.sequences
            self._searches[add.request_id] = search
        else:
            opened = OpenRequest.of(add, self.arrivals, seeds, self._tokenizer)
        opened.seed, opened.keep_alive = seed, keep_alive
        self.arrivals += len(seeds)
        self._open[add.request_id] = opened
        for name, request in opened.sequences.items():
            self._owner[name] = opened
            self._scheduler.add(request)

    def mark_scheduled(self, sequence: str) -> None:
        """Record the time at which the first step of a sequence starts."""
        self._owner[sequence].mark_scheduled()

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Abort a request and return its last output. Return [] if the request has ended."""
        opened = self._open.get(request_id)
        return [] if opened is None else [self._end(opened, "abort")]

    def fail(self, sequence: str, error: BaseException | None) -> list[RequestOutput]:
        """End the request of a failed sequence with an error. Return [] if the request has
        ended."""
        opened = self._owner.get(sequence)
        if opened is None:
            return []
        logger.error("request %r failed", opened.add.request_id, exc_info=error)
        said = str(error) if isinstance(error, NotFinite | EasyDeLError) else repr(error)
        return [self._end(opened, "error", f"the engine failed on this request: {said}")]

    def extend_beams(self, result: StepResult) -> list[RequestOutput]:
        """Pass the candidates of a step to the beam searches, and return the ended ones.

        Args:
            result: the result of the step, which the scheduler has processed.
        """
        outputs = list[RequestOutput]()
        for index, row in enumerate(result.plan.rows) if self._searches else ():
            opened = self._owner.get(row.request_id)
            search = None if opened is None else self._searches.get(opened.add.request_id)
            if opened is None or search is None or not row.samples:
                continue
            (scores,) = result.get_token_scores(index, 1, search.num_candidates)
            search.take(row.request_id, scores)
            previous_names = {*opened.sequences}
            if search.extend(self._scheduler):
                for sequence in opened.sequences:
                    self._scheduler.finish(sequence, "stop")
                opened.closed = True
                output = opened.delta(search.outputs())
                output.metrics.num_generated_tokens = search.num_tokens
                outputs.append(self._close(opened, output))
                continue
            for name in previous_names - opened.sequences.keys():
                del self._owner[name]
            for name in opened.sequences.keys() - previous_names:
                self._owner[name] = opened
        return outputs

    def take(
        self,
        result: StepResult,
        token_counts: dict[str, int],
        fail: Callable[[str, Exception], None],
    ) -> list[RequestOutput]:
        """Convert the result of a step to deltas. A stop string finishes its sequence.

        Args:
            result: the result of the step.
            token_counts: sequence id -> number of sampled tokens that the scheduler appended.
            fail: callback for a sequence whose result cannot be read, with the error.
        """
        changed: dict[str, list[CompletionOutput]] = {}
        outputs: list[RequestOutput] = []
        for index, row in enumerate(result.plan.rows):
            opened = self._owner.get(row.request_id)
            if opened is None:
                continue  # ended while the step ran
            try:
                out = self._read(result, index, row, opened, token_counts.get(row.request_id))
            except Exception as error:
                fail(row.request_id, error)
                continue
            if isinstance(out, RequestOutput):
                outputs.append(self._close(opened, out))
            elif out is not None:
                changed.setdefault(opened.add.request_id, []).append(out)
        for name, outs in changed.items():
            opened = self._open.get(name)
            if opened is not None:  # another sequence of the request may have failed
                outputs.append(self._close(opened, opened.delta(outs)))
        return outputs

    def _read(
        self, result: StepResult, index: int, row: PlanRow, opened: OpenRequest, count: int | None
    ) -> CompletionOutput | RequestOutput | None:
        """Return the output of row `index` of a step: `count` tokens or a vector."""
        params = opened.add.params
        writer = opened.writers.get(row.request_id)
        experts = None if writer is None else result.experts(index)
        if writer is not None and experts is not None:
            writer.keep_experts(row.start, experts)
        if row.scores and isinstance(params, SamplingParams):
            opened.take_prompt(row.start, result.prompt(index, params.prompt_logprobs or 0))
        if count is None:
            return None
        if not isinstance(params, SamplingParams):
            by_token = params.task == "token_embed"
            return opened.build_pooled_output(
                result.token_states(index) if by_token else result.get_pooled_vector(index)
            )
        assert writer is not None, "beam searches take their own candidates"
        if writer.finish_reason is not None:
            return None
        scores = result.get_token_scores(index, count, params.logprobs) if count else []
        out = writer.take(scores, result.masks(index, count))
        if out.finish_reason is not None:
            self._scheduler.finish(row.request_id, out.finish_reason, out.stop_reason)
        return out

    def _end(
        self, opened: OpenRequest, reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        for sequence in opened.sequences:
            self._scheduler.finish(sequence, reason)
        return self._close(opened, opened.end(reason, error))

    def _close(self, opened: OpenRequest, delta: RequestOutput) -> RequestOutput:
        """Remove a request if this output is its last."""
        if delta.finished:
            del self._open[opened.add.request_id]
            self._searches.pop(opened.add.request_id, None)
            for name in opened.sequences:
                del self._owner[name]
        return delta
