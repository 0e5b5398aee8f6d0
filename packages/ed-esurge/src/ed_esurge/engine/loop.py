"""`EngineLoop`: executes commands, runs steps and converts results to outputs of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger
from ed_models.adapters.values import uses_dora
from tqdm import tqdm

from ed_esurge.core.adapters import AdapterTable
from ed_esurge.core.commands import (
    Abort,
    Add,
    Command,
    DropWeights,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StorePages,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import RequestError
from ed_esurge.core.scheduler import Scheduler, plan_ahead
from ed_esurge.core.step_time import ONE_STEP
from ed_esurge.engine.ledger import Ledger
from ed_esurge.engine.transport import Transport
from ed_esurge.model import get_platform
from ed_esurge.outputs import STEP_SIZES, RequestOutput
from ed_esurge.runner.protocol import Runner
from ed_esurge.runner.result import NotFinite, StepParts, StepResult
from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)

#: Id of a sequence that failed before a step, and its error.
Refusal = tuple[str, BaseException | None]


class EngineLoop:
    """One scheduler with one runner. Not thread-safe.

    The same commands between the same steps produce the same plans in every process.

    Args:
        scheduler: plans the steps.
        runner: runs the plans.
        tokenizer: tokenizer of the outputs; None produces no text.
        transport: connection to the other processes of the engine.
        max_loras: maximum number of loaded LoRA adapters.
        seed: seed of requests without one.
        overlap: whether to start the next step before the text of this step is detokenized.
        ahead: whether to start the next step before the tokens of this step are read, if the plan
            does not depend on them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        transport: Transport,
        *,
        max_loras: int,
        seed: int,
        overlap: bool,
        ahead: bool,
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._transport = transport
        self.adapters = AdapterTable(max_loras)
        self.paused = self.asleep = False
        self.backlog: list[RequestOutput] = []
        """Outputs that the next `step` returns."""
        self.ledger = Ledger(scheduler, tokenizer, seed)
        self._overlap, self._ahead = overlap, ahead
        self._pending: StepResult | None = None
        self.store_pages: Callable[[EngineLoop, int | None], None] = lambda loop, most: None
        """Writes the pages of the prefix cache of a loop."""
        self.spoilt = False
        """Whether pages contain values that are not finite."""
        self._refusals: list[Refusal] = []
        self._steps = self._traced_early = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._step_tokens = 0
        self._narrowed = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.ledger

    def memory_bytes(self) -> int:
        """Return the bytes of weights, adapter slots, pages and states over all devices."""
        return self.runner.memory_bytes()

    @property
    def open_requests(self) -> list[str]:
        """Ids of the waiting and running requests."""
        return self.ledger.names

    # ---- commands

    def execute(self, command: Command) -> None:
        """Execute a command before the next step.

        Raises:
            ConfigError: the id of a new request is in use, its adapter is not loaded, or weights or
                an adapter do not match the model.
        """
        match command:
            case Add():
                self._add(command)
            case Abort(request_id):
                self.backlog += self.ledger.abort(request_id)
            case Pause(free_pages):
                self._settle()
                self.paused = True
                if free_pages and self.runner.allocated:
                    self._free()
            case Resume():
                self._resume()
            case Sleep(keep_weights):
                self._sleep(keep_weights)
            case WakeUp():
                self.runner.weights.from_host()
                if not self.runner.weights.there:
                    raise ConfigError(
                        "the engine has no weights, because they were dropped by sleep(level=2): "
                        "call update_model_weights(model) first"
                    )
                self._resume()
            case UpdateWeights(weights, copy):
                for adapter in self.adapters:
                    if adapter.dora:
                        raise ConfigError(
                            f"the LoRA adapter {adapter.name!r} uses DoRA, which depends on the "
                            "weights: unload it, update the weights, and load it again"
                        )
                self._settle()
                self.runner.weights.replace(weights, copy=copy)
            case DropWeights():
                self._settle()
                self.runner.weights.drop()
            case ResetPrefixCache():
                self._settle()
            case StorePages(most_bytes):
                self.store_pages(self, most_bytes)
            case LoadAdapter():
                self._load_adapter(command)
            case UnloadAdapter(name):
                self.adapters.remove(name)

    def _add(self, add: Add) -> None:
        if add.adapter and not self.adapters.knows(add.adapter):
            raise ConfigError(
                f"the LoRA adapter of request {add.request_id!r} (number {add.adapter}) was "
                "unloaded: load the adapter again, or omit lora_name"
            )
        self.ledger.add(add, self.runner.hold(add.params))

    def _resume(self) -> None:
        if not self.runner.allocated:
            self._allocate()
        self.paused = self.asleep = False

    def _sleep(self, keep_weights: bool) -> None:
        self._settle()
        self.paused = self.asleep = True
        if self.runner.allocated:
            self._free()
        if not keep_weights:
            self.runner.weights.drop()
        elif self.runner.weights.there and get_platform(self.runner.model) != "cpu":
            self.runner.weights.to_host()

    def _load_adapter(self, load: LoadAdapter) -> None:
        rank = max(layer.spec.rank for layer in load.adapter.values())
        used = {request.adapter for request in self.scheduler.requests.values()}
        loaded = self.adapters.add(load.name, rank, load.source, used, dora=uses_dora(load.adapter))
        try:
            self.runner.load_adapter(loaded.number, loaded.place, load.adapter)
        except BaseException:
            self.adapters.remove(load.name)
            raise

    def _settle(self) -> None:
        """Finish the running step, preempt all sequences and clear the prefix cache. Pages with
        values that are not finite are reallocated."""
        if self._pending is not None:
            result, self._pending = self._pending, None
            tokens = self._finite(result)
            if not result.plan.ahead:  # the results of a step made ahead are discarded
                token_counts = self.scheduler.advance(result.plan, tokens)
                self.backlog += self.ledger.extend_beams(result)
                self._deliver(result, token_counts)
        self._begin_anew()
        if self.spoilt:
            self.spoilt = False
            if self.runner.allocated:
                self._free()
                self._allocate()

    def _begin_anew(self) -> None:
        self.scheduler.preempt_all()
        self.scheduler.forget_cached()

    # ---- steps

    def launch(self) -> None:
        """Start the next step if no step runs. Return without waiting for the device."""
        if self._pending is None and not self.paused:
            self._pending = self._start(self.scheduler.schedule())

    @property
    def in_flight(self) -> bool:
        """Whether a started step has results that `step` has not read."""
        return self._pending is not None

    @property
    def ready(self) -> bool:
        """Whether `step` can read these results without waiting for the device."""
        return self._pending is not None and self._pending.ready

    def wait(self) -> None:
        """Wait until the device has finished the started step, if any."""
        if self._pending is not None:
            self._pending.wait()

    def step(self) -> list[RequestOutput]:
        """Run one step for all requests and return the new outputs (`RequestOutput.delta`).

        A failure of one request ends that request with an error. A raised error concerns all
        requests.

        Raises:
            EasyDeLError: the weights were dropped, or are not finite.
        """
        self._refusals.clear()
        if self._narrowed and not self.runner.num_pending:
            self._narrowed = False
            self.scheduler.narrow(None)
        if not self.paused:
            result = self._pending or self._start(self.scheduler.schedule())
            self._pending = None
            if result is not None:
                # Keeps the device busy while the host reads the results. Prompts are long:
                # requests that arrive in this time should not wait for a further step.
                if self._ahead and not result.plan.has_prompts:
                    self._pending = self._start(plan_ahead(result.plan, self.scheduler))
                token_counts = self.scheduler.advance(result.plan, self._finite(result))
                self.backlog += self.ledger.extend_beams(result)
                if self._overlap and self._pending is None and not self.spoilt:
                    # The device computes the next step while the host detokenizes this step.
                    self._pending = self._start(self.scheduler.schedule())
                self._deliver(result, token_counts)
            if self.spoilt:
                self._renew_pages()
        outputs, self.backlog = self.backlog, []
        return outputs

    def _start(self, plan: StepPlan | None) -> StepResult | None:
        if plan is None:
            return None
        self._steps += plan.steps
        tokens = sum(len(row.token_ids) for row in plan.rows)
        self._step_tokens += plan.steps * tokens
        self._step_sizes[bisect_left(STEP_SIZES, tokens)] += plan.steps
        for new in plan.started:
            self.ledger.mark_scheduled(new.request_id)
        try:
            return self.runner.run(plan)
        except RequestError as error:
            self._refusals.append((error.request_id, error.__cause__))
            self._refuse(error.request_id, error.__cause__)
            return None

    def _refuse(self, request_id: str, error: BaseException | None) -> None:
        """Handle a plan that was not computed because one sequence failed. The scheduler assumes
        that all rows were computed, so all sequences start again."""
        self._fail(request_id, error)
        self._begin_anew()

    # ---- results of replicas in other processes

    def take_refusals(self) -> list[Refusal]:
        """Return and clear the failures that prevented a step since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def parts(self) -> StepParts | None:
        """Return the results of the running step, read from the device."""
        return None if self._pending is None else self._pending.parts()

    def repeat(self, refusals: Sequence[Refusal], parts: StepParts | None) -> None:
        """Apply the outcome of the process that runs this replica.

        Each refusal corresponds to one launch in that process. This process repeats the launches,
        so its plan of the running step is the same.

        Args:
            refusals: value of `take_refusals` in that process.
            parts: value of `parts` in that process.
        """
        for refusal in refusals:
            self.launch()
            self._pending = None
            self._refuse(*refusal)
        if parts is not None:
            self.launch()
            if self._pending is None:
                raise EasyDeLError("the processes of this engine no longer plan the same steps")
            self._pending = StepResult.from_parts(self._pending.plan, parts)

    def _fail(self, sequence: str, error: BaseException | None) -> None:
        """End the request of a sequence with an error, unless it ended while the step ran."""
        self.spoilt |= isinstance(error, NotFinite)
        self.backlog += self.ledger.fail(sequence, error)

    def _finite(self, result: StepResult) -> dict[str, list[int]]:
        """Return the sampled tokens of a step. End the requests without a token: their logits are
        not finite, or their grammars allow no token."""
        for name, error in result.failures.items():
            self._fail(name, error)
        for name in result.not_finite():
            self._fail(name, NotFinite())
        return result.tokens()

    def _deliver(self, result: StepResult, token_counts: dict[str, int]) -> None:
        self.backlog += self.ledger.take(result, token_counts, self._fail)
        for name in result.get_interrupted_ids():
            self._fail(name, NotFinite())

    def _renew_pages(self) -> None:
        """Reallocate pages with values that are not finite. Even masked attention to such values
        produces values that are not finite.

        Raises:
            EasyDeLError: the weights are not finite, so every request would fail.
        """
        if not all(self._transport.gather(self.runner.weights.are_finite())):
            raise EasyDeLError(
                "the served weights are not finite (NaN or infinity), so every request fails: call "
                "update_model_weights(model) with finite weights"
            )
        self._settle()

    def _free(self) -> None:
        self.runner.free()
        if self.scheduler.proposer is not None:
            self.scheduler.proposer.free()

    def _allocate(self) -> None:
        self.runner.allocate()
        if self.scheduler.proposer is not None:
            self.scheduler.proposer.allocate()

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all programs of the steps and update the progress bar."""
        self.runner.compile_all(progress)
        if self.scheduler.proposer is not None:
            self.scheduler.proposer.compile_all(progress)
        self._traced_early = self.runner.num_traces

    def compile_first(self, progress: tqdm[NoReturn]) -> None:
        """Compile one generic shape, and the other shapes in a background thread. Until then, steps
        have at most the tokens of the generic shape.

        Engines with proposals, and models that need whole prompts, compile all.
        """
        scheduler, runner = self.scheduler, self.runner
        if scheduler.proposer is not None or scheduler.limits.whole_prompts:
            self.compile_all(progress)
            return
        shape = runner.compile_first(progress)
        self._traced_early = runner.num_traces
        if shape is not None:
            limits = scheduler.limits
            shapes = ((shape.tokens, shape.seqs),) if limits.shapes else ()
            narrow = replace(limits, token_budget=shape.tokens, shapes=shapes, time=ONE_STEP)
            scheduler.narrow(narrow)
            self._narrowed = True

    # ---- numbers

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the `stats` of each replica: a list with one entry."""
        return [self.stats()]

    def stats(self) -> dict[str, float]:
        """Return current metrics. Counters start at engine creation."""
        scheduler, prefixes = self.scheduler, self.scheduler.pages.prefixes
        offload: dict[str, float] = {}
        if self.runner.host is not None and prefixes is not None:
            offload = {
                "external_prefix_cache_queries": prefixes.host_queries,
                "external_prefix_cache_hits": prefixes.host_hits,
                "kv_offload_store_bytes": self.runner.host.bytes_saved,
                "kv_offload_load_bytes": self.runner.host.bytes_loaded,
                "kv_offload_cpu_cache_usage": prefixes.host_usage,
            }
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage": scheduler.pages.usage,
            "prefix_cache_queries": prefixes.queries if prefixes is not None else 0,
            "prefix_cache_hits": prefixes.hits if prefixes is not None else 0,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": self._steps,
            "num_pages": sum(pool.num_pages for pool in scheduler.pages.pools.values()),
            "iteration_tokens_sum": self._step_tokens,
            **{
                f"iteration_tokens_{bound}": count
                for bound, count in zip((*STEP_SIZES, "inf"), self._step_sizes, strict=True)
            },
            "num_compiled": self.runner.num_traces,
            "programs_pending": self.runner.num_pending,
            "recompiles": self.runner.num_traces - self._traced_early,
            **offload,
            **self._encoder_stats(),
            **(scheduler.proposer.stats() if scheduler.proposer is not None else {}),
        }

    def _encoder_stats(self) -> dict[str, float]:
        """Return the metrics of the table of encoder outputs; none without a table."""
        encoder, items = self.scheduler.encoder, self.runner.items
        if not isinstance(encoder, EncoderCache) or items is None:
            return {}
        row = items.features * np.dtype(cast(Any, self.runner.model).dtype).itemsize
        return {
            "mm_cache_queries": encoder.queries,
            "mm_cache_hits": encoder.hits,
            "encoder_cache_usage": encoder.usage,
            "encoder_cache_entries": encoder.num_items,
            "encoder_cache_bytes": encoder.num_rows * row,
        }
