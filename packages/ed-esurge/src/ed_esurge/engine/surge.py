"""`eSurge`: continuous batching over one model, driven by whoever calls `step`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.completion import Group
from ed_esurge.config import EngineConfig
from ed_esurge.core.scheduler import Scheduler
from ed_esurge.engine.intake import Intake, Prompt, as_prompts
from ed_esurge.engine.setup import Setup, eos_token_ids, served_model
from ed_esurge.engine.setup import model_name as name_of
from ed_esurge.outputs import CompletionOutput, RequestOutput
from ed_esurge.progress import Counter
from ed_esurge.runner.model_runner import wants_scores
from ed_esurge.runner.result import StepResult
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import render_chat

logger = get_logger(__name__)


class eSurge:
    """A serving engine.

    Args:
        model: a causal language model of ed_models; on a CPU the engine keeps an unrolled copy of
            its layout (the arrays are shared where the layout allows).
        tokenizer: a Hugging Face tokenizer; None serves token ids only.
        config: an `EngineConfig`, or a mapping of its fields.
        model_name: what the model is called to clients; default: where it came from.
        options: fields of `EngineConfig`, over `config`.

    Example:
        >>> engine = eSurge(model, tokenizer, max_model_len=1024)
        >>> engine.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        model_name: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = EngineConfig(**{**(config or {}), **options})
        elif options:
            config = config.replace(**options)
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name or name_of(model)
        model = served_model(model)
        setup = Setup.resolve(model, config)
        self.max_model_len = setup.limits.max_model_len
        self._runner = setup.runner(model, config)
        self.vocab_size = self._runner.vocab_size
        self.eos_token_ids = eos_token_ids(model, tokenizer, config.extra_eos_token_ids)
        self._scheduler = Scheduler(
            setup.limits,
            num_pages=self._runner.num_pages,
            page_size=config.page_size,
            prefix_caching=config.enable_prefix_caching,
        )
        self._intake = Intake(
            config,
            tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_logprobs=self._runner.max_logprobs,
        )
        self._groups: dict[str, Group] = {}
        self._owner: dict[str, Group] = {}  # by the id of a sequence
        self._pending: StepResult | None = None
        self._backlog: list[RequestOutput] = []
        self._arrivals = self._names = self._steps = 0
        self._paused = False
        self._lock = threading.RLock()
        if config.compile_runner:
            with Counter("compiling", quiet=config.silent_mode) as counter:
                self._runner.compile_all(counter.show)
        if not config.silent_mode:
            logger.info("%s: %s", self.model_name, self.describe())

    def describe(self) -> str:
        """One line on what was set up."""
        runner, limits = self._runner, self._scheduler.limits
        return (
            f"{runner.num_pages} pages of {runner.page_size} tokens "
            f"({runner.cache_bytes() / 2**30:.2f} GiB), up to {limits.max_num_seqs} sequences of "
            f"{limits.max_model_len} tokens, {limits.token_budget} tokens a step, "
            f"{len(runner.buckets.shapes)} shapes"
        )

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request; its outputs come from `step`.

        Args:
            request_id: unique among those that are not finished.
            prompt: text, or token ids.
            sampling_params: default `SamplingParams()`.
            priority: smaller goes first, under the `priority` policy.

        Raises:
            ConfigError: the request can never run, or its id is in use.
        """
        self.submit(self.prepare(request_id, prompt, sampling_params, priority=priority))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Group:
        """Check and tokenize a request without queueing it; safe in any thread."""
        return self._intake.group(request_id, prompt, sampling_params or SamplingParams(), priority)

    def submit(self, group: Group) -> None:
        """Queue what `prepare` made."""
        with self._lock:
            if group.request_id in self._groups:
                raise ConfigError(f"request id {group.request_id!r} is in use: choose another")
            self._arrivals = self._intake.number(group, self._arrivals)
            self._groups[group.request_id] = group
            for sequence, completion in group.completions.items():
                self._owner[sequence] = group
                self._scheduler.add(completion.request)

    def abort_request(self, request_id: str) -> bool:
        """End a request; `step` gives its last output. False if it is not running."""
        with self._lock:
            group = self._groups.get(request_id)
            if group is None:
                return False
            ended = []
            for sequence, completion in group.completions.items():
                if completion.finish_reason is None:
                    self._scheduler.finish(sequence, "abort")
                    ended.append(completion.abort())
            self._backlog.append(self._emit(group, ended))
            return True

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to give."""
        return bool(self._groups or self._backlog)

    def unfinished_requests(self) -> list[str]:
        """Ids of the requests that wait or run."""
        return list(self._groups)

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step for everybody, and return what is new (`RequestOutput.delta`)."""
        with self._lock:
            outputs, self._backlog = self._backlog, []
            if self._paused:
                return outputs
            result = self._pending or self._start()
            self._pending = None
            if result is None:
                return outputs
            grown = {
                request.request_id
                for request in self._scheduler.advance(result.plan, result.tokens())
            }
            if self.config.overlap_execution:
                # The device works on the next step while this one's text is made.
                self._pending = self._start()
            return outputs + self._deliver(result, grown)

    def _start(self) -> StepResult | None:
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        self._steps += 1
        for row in plan.rows:
            self._owner[row.request_id].mark_scheduled()
        return self._runner.run(plan, self._scheduler.requests)

    def _deliver(self, result: StepResult, grown: set[str]) -> list[RequestOutput]:
        """Turn a step's tokens into deltas; a stop string found here ends its request."""
        changed: dict[str, list[CompletionOutput]] = {}
        for index, row in enumerate(result.plan.rows):
            group = self._owner.get(row.request_id)
            if group is None:
                continue  # ended while the step ran
            completion = group.completions[row.request_id]
            params = completion.request.params
            if wants_scores(completion.request, row.start):
                count = params.prompt_logprobs or 0
                group.take_prompt(row.start, result.prompt(index, count), self.tokenizer)
            if row.request_id not in grown or completion.finish_reason is not None:
                continue
            out = completion.take(result.sampled(index, params.logprobs))
            if out.finish_reason is not None:
                self._scheduler.finish(row.request_id, out.finish_reason, out.stop_reason)
            changed.setdefault(group.request_id, []).append(out)
        return [self._emit(self._groups[name], outs) for name, outs in changed.items()]

    def _emit(self, group: Group, outputs: list[CompletionOutput]) -> RequestOutput:
        delta = group.delta(outputs)
        if delta.finished:
            del self._groups[group.request_id]
            for sequence in group.completions:
                del self._owner[sequence]
        return delta

    # ---- the simple interface

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts to their ends, all at once.

        Args:
            prompts: one prompt or many, each text or token ids.
            sampling_params: for all of them, or one each.
            use_tqdm: show how many are done.

        Returns:
            one output per prompt, in their order.
        """
        many = as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        else:
            params = list(sampling_params)
        if len(params) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(params)} sampling parameters")
        names = [self._name() for _ in many]
        groups = [self.prepare(*args) for args in zip(names, many, params, strict=True)]
        for group in groups:
            self.submit(group)
        whole: dict[str, RequestOutput] = {}
        done = 0
        with Counter("prompts", quiet=not use_tqdm) as counter:
            for delta in self._follow(set(names)):
                if delta.request_id in whole:
                    whole[delta.request_id].add(delta)
                else:
                    delta.delta = False
                    whole[delta.request_id] = delta
                done += delta.finished
                counter.show(done, len(many))
        return [whole[name] for name in names]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Deltas of one request as they come; leaving the loop aborts it."""
        name = self._name()
        self.add_request(name, prompt, sampling_params)
        return self._follow({name})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answer a conversation.

        Args:
            messages: `{"role": …, "content": …}`.
            template: for the tokenizer's `apply_chat_template` (`tools`, …).
        """
        return self.generate(render_chat(self.tokenizer, messages, **template), sampling_params)[0]

    def _follow(self, names: set[str]) -> Iterator[RequestOutput]:
        """Step until these requests are done, keeping other requests' outputs for `step`."""
        waiting = set(names)
        try:
            while waiting:
                if self._paused:
                    raise EasyDeLError("the engine is paused: call resume() first")
                others = []
                for output in self.step():
                    if output.request_id not in names:
                        others.append(output)
                        continue
                    if output.finished:
                        waiting.discard(output.request_id)
                    yield output
                self._backlog = others + self._backlog
        finally:
            for name in waiting:
                self.abort_request(name)
            self._backlog = [out for out in self._backlog if out.request_id not in names]

    def _name(self) -> str:
        self._names += 1
        return f"eSurge-{self._names}"

    # ---- weights and memory

    def update_model_weights(self, model_or_state: Any) -> None:
        """Serve other weights from the next step on.

        Requests in flight go on with their tokens, which are computed anew; cached prefixes are
        dropped. Nothing is compiled.

        Args:
            model_or_state: a model of the same architecture, in any layout, or its state.
        """
        with self._lock:
            self._settle()
            self._runner.replace_weights(model_or_state)

    def pause(self) -> None:
        """Stop stepping. With `destroy_pages_on_pause` the pages' memory is freed; requests in
        flight stay queued and are computed anew after `resume`."""
        with self._lock:
            self._settle()
            self._paused = True
            if self.config.destroy_pages_on_pause and self._runner.allocated:
                self._runner.free()

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return self._paused

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._lock:
            if not self._runner.allocated:
                self._runner.allocate()
            self._paused = False

    def terminate(self) -> None:
        """Abort everything and free the pages. The engine is of no use afterwards."""
        with self._lock:
            for name in list(self._groups):
                self.abort_request(name)
            self.pause()
            if self._runner.allocated:
                self._runner.free()

    def _settle(self) -> None:
        """Finish the step in flight, send everybody back to the queue, drop cached prefixes."""
        if self._pending is not None:
            result, self._pending = self._pending, None
            grown = self._scheduler.advance(result.plan, result.tokens())
            self._backlog += self._deliver(result, {request.request_id for request in grown})
        self._scheduler.preempt_all()
        self._scheduler.forget_prefixes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    # ---- numbers

    def stats(self) -> dict[str, float]:
        """Current numbers, for metrics; counters count from the start."""
        scheduler = self._scheduler
        cache = scheduler.prefix_cache
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage": scheduler.pool.usage,
            "prefix_cache_queries": cache.queries if cache is not None else 0,
            "prefix_cache_hits": cache.hits if cache is not None else 0,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": self._steps,
            "num_compiled": self._runner.num_traces,
        }
