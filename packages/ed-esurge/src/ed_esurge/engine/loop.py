"""`EngineLoop`: executes commands, steps, and turns results into outputs of requests."""

from __future__ import annotations

from ed_infra.errors import ConfigError

from ed_esurge.core.commands import (
    Abort,
    Add,
    Command,
    DropWeights,
    Pause,
    Resume,
    UpdateWeights,
)
from ed_esurge.core.scheduler import Scheduler
from ed_esurge.engine.intake import seeds_of
from ed_esurge.outputs import CompletionOutput, RequestOutput
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.runner.result import StepResult
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import Tokenizer
from ed_esurge.transcript import OpenRequest


class EngineLoop:
    """One scheduler over one runner. Not for two threads at once.

    The same commands between the same steps give the same plans, in any process.

    Args:
        tokenizer: None gives no text.
        seed: of requests that bring none.
        overlap: start the next step before the text of this one is made.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        overlap: bool,
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.paused = False
        self.backlog: list[RequestOutput] = []
        """Outputs that the next `step` gives."""
        self._tokenizer, self._seed, self._overlap = tokenizer, seed, overlap
        self._open: dict[str, OpenRequest] = {}
        self._owner: dict[str, OpenRequest] = {}  # by the id of a sequence
        self._pending: StepResult | None = None
        self._arrivals = self._steps = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that wait or run."""
        return list(self._open)

    # ---- commands

    def execute(self, command: Command) -> None:
        """Do as told, before the next step.

        Raises:
            ConfigError: the id of a new request is in use, its adapter is not there, or weights do
                not fit.
        """
        match command:
            case Add():
                self._add(command)
            case Abort(request_id):
                self._abort(request_id)
            case Pause(free_pages):
                self._settle()
                self.paused = True
                if free_pages and self.runner.allocated:
                    self.runner.free()
            case Resume():
                if not self.runner.allocated:
                    self.runner.allocate()
                self.paused = False
            case UpdateWeights(weights, copy):
                self._settle()
                self.runner.replace_weights(weights, copy=copy)
            case DropWeights():
                self._settle()
                self.runner.drop_weights()

    def _add(self, add: Add) -> None:
        if add.request_id in self._open:
            raise ConfigError(f"request id {add.request_id!r} is in use: choose another")
        if add.adapter:
            raise ConfigError(
                f"request {add.request_id!r} asks for adapter {add.adapter}, but the served model "
                "has none: leave adapter at 0"
            )
        seeds = seeds_of(add.params, self._seed, self._arrivals)
        opened = OpenRequest.of(add, self._arrivals, seeds, self._tokenizer)
        self._arrivals += len(seeds)
        self._open[add.request_id] = opened
        for name, request in opened.sequences.items():
            self._owner[name] = opened
            self.scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            for name in opened.sequences:
                self.scheduler.finish(name, "abort")
            self.backlog.append(self._close(opened, opened.abort()))

    def _settle(self) -> None:
        """Finish the step in flight, send everybody back to the queue, drop cached prefixes."""
        if self._pending is not None:
            result, self._pending = self._pending, None
            taken = self.scheduler.advance(result.plan, result.tokens())
            self.backlog += self._deliver(result, taken)
        self.scheduler.preempt_all()
        self.scheduler.pages.forget_prefixes()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step for everybody, and return what is new (`RequestOutput.delta`)."""
        outputs, self.backlog = self.backlog, []
        if self.paused:
            return outputs
        result = self._pending or self._start()
        self._pending = None
        if result is None:
            return outputs
        taken = self.scheduler.advance(result.plan, result.tokens())
        if self._overlap:
            # The device works on the next step while this one's text is made.
            self._pending = self._start()
        return outputs + self._deliver(result, taken)

    def _start(self) -> StepResult | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._steps += 1
        for new in plan.started:
            self._owner[new.request_id].mark_scheduled()
        return self.runner.run(plan)

    def _deliver(self, result: StepResult, taken: dict[str, int]) -> list[RequestOutput]:
        """Turn a step's result into deltas; a stop string that appears ends its request."""
        changed: dict[str, list[CompletionOutput]] = {}
        outputs: list[RequestOutput] = []
        for index, row in enumerate(result.plan.rows):
            opened = self._owner.get(row.request_id)
            if opened is None:
                continue  # ended while the step ran
            params = opened.add.params
            if row.scores and isinstance(params, SamplingParams):
                opened.take_prompt(row.start, result.prompt(index, params.prompt_logprobs or 0))
            count = taken.get(row.request_id)
            if count is None:
                continue
            if not isinstance(params, SamplingParams):
                outputs.append(self._close(opened, opened.pooled(result.pooled(index))))
                continue
            transcript = opened.transcripts[row.request_id]
            if transcript.finish_reason is not None:
                continue
            scores = result.sampled(index, params.logprobs)[:count] if count else []
            out = transcript.take(scores)
            if out.finish_reason is not None:
                self.scheduler.finish(row.request_id, out.finish_reason, out.stop_reason)
            changed.setdefault(opened.add.request_id, []).append(out)
        for name, outs in changed.items():
            opened = self._open[name]
            outputs.append(self._close(opened, opened.delta(outs)))
        return outputs

    def _close(self, opened: OpenRequest, delta: RequestOutput) -> RequestOutput:
        """Forget a request with its last output."""
        if delta.finished:
            del self._open[opened.add.request_id]
            for name in opened.sequences:
                del self._owner[name]
        return delta

    # ---- numbers

    def stats(self) -> dict[str, float]:
        """Current numbers, for metrics; counters count from the start."""
        scheduler, prefixes = self.scheduler, self.scheduler.pages.prefixes
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage": scheduler.pages.usage,
            "prefix_cache_queries": prefixes.queries if prefixes is not None else 0,
            "prefix_cache_hits": prefixes.hits if prefixes is not None else 0,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": self._steps,
            "num_compiled": self.runner.num_traces,
        }
