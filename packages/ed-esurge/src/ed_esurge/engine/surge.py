"""`eSurge`: continuous batching over one model, driven by calls of `step`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, Unpack, overload

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger
from ed_layers import native
from ed_models.protocol import LanguageModel
from jaxtyping import Float
from tqdm import tqdm

from ed_esurge.certificates import certificate_summary
from ed_esurge.config import NOTHING, EngineConfig, Records
from ed_esurge.core.commands import Abort, Add, Command, EncoderInput, Pause, StorePages
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.embedded_prompts import EmbeddedPrompts
from ed_esurge.engine.assembly import loop_over
from ed_esurge.engine.control import EngineControl
from ed_esurge.engine.disk_pages import DiskPages
from ed_esurge.engine.facts import EngineFacts, EngineWithFacts, describe_dtypes
from ed_esurge.engine.intake import (
    CheckedPrompt,
    Intake,
    PromptInput,
    RequestOptions,
    RequestParams,
    check_request_keywords,
    list_prompts,
)
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.setup import tokens_together
from ed_esurge.grammars.store import Grammars
from ed_esurge.logged import LoggedRequest
from ed_esurge.model import (
    eos_token_ids,
    get_decoder_start,
    get_embedding_settings,
    get_labels,
    get_sampling_defaults,
    get_task,
    get_vocab_size,
    is_encoder,
)
from ed_esurge.model import model_name as name_of
from ed_esurge.outputs import RequestOutput, accumulate_texts
from ed_esurge.sampling import PoolingParams, SamplingParams
from ed_esurge.template import ChatTemplate
from ed_esurge.tokenizer import Tokenizer
from ed_esurge.tokenizer_endpoints import connect_tokenizers

logger = get_logger(__name__)

_Messages = Sequence[Mapping[str, Any]]


class eSurge(EngineControl, EngineWithFacts):
    """A serving engine.

    Args:
        model: a causal language model of ed_models. On a CPU the engine keeps a copy with unrolled
            layers, which shares arrays where the layout permits.
        tokenizer: a Hugging Face tokenizer; None serves token ids only.
        processor: processor of a vision-language checkpoint, for images in chat requests.
        config: an `EngineConfig`, or a mapping of its fields.
        model_name: name of the model for clients; default: the source of the model.
        draft_model: model that proposes tokens, for the `speculative_config` method `draft_model`.
        certificate: summary of the certificate of the model, see `ed_esurge.certificates`.
        read_model: reads a model of the same architecture from a directory, for
            `AsyncEngine.load_weights`.
        directory: directory of the checkpoint, from which the server reads facts about the model.
        records: what the outputs contain in addition: `routed_experts` and `sampling_masks` of
            `CompletionOutput`. An engine that records experts computes every token of a prompt,
            without a prefix cache.
        options: fields of `EngineConfig`; they override `config`.

    Example:
        >>> engine = eSurge(model, tokenizer, max_model_len=1024)
        >>> engine.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        model_name: str | None = None,
        draft_model: LanguageModel | None = None,
        processor: Any = None,
        certificate: Mapping[str, Any] | None = None,
        read_model: Callable[[Path], LanguageModel] | None = None,
        directory: Path | None = None,
        records: Records = NOTHING,
        **options: object,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = EngineConfig(**{**(config or {}), **options})
        elif options:
            config = config.replace(**options)
        self.config = config
        self.tokenizer, self.processor = tokenizer, processor
        self.read_model, self.directory = read_model, directory
        end_tokens = eos_token_ids(model, tokenizer, config.extra_eos_token_ids)
        grammars = Grammars.of(tokenizer, get_vocab_size(model), end_tokens)
        prompt_tokenizer, output_tokenizer = connect_tokenizers(
            tokenizer, config.tokenizer_endpoint, config.detokenizer_endpoint
        )
        self.loop, self.transport = loop_over(
            *(model, config, output_tokenizer, grammars, draft_model),
            records=records,
        )
        runner = self.loop.runner
        self._facts = EngineFacts(
            model_name=model_name or name_of(model),
            max_model_len=self.loop.scheduler.limits.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=tuple(end_tokens),
            input_names=tuple(model.input_names),
            task=get_task(model),
            labels=get_labels(model),
            embedding_settings=get_embedding_settings(model),
            recording_form=getattr(runner.model, "recording_form", None),
            certificate=certificate,
            sampling_defaults=get_sampling_defaults(model),
        )
        encoder = self.loop.scheduler.encoder
        whole_items = isinstance(encoder, EncoderCache) and encoder.whole
        encodes = is_encoder(runner.model)
        self._intake = Intake(
            config,
            prompt_tokenizer,
            eos_token_ids=end_tokens,
            max_model_len=self._facts.max_model_len,
            vocab_size=self.vocab_size,
            max_logprobs=runner.max_logprobs,
            prompt_class=None if encodes else runner.model.prompt_class,
            samples=not encodes,
            grammars=grammars,
            items=runner.items,
            most_together=tokens_together(self.loop.scheduler.limits) if whole_items else None,
            decoder=get_decoder_start(runner.model),
            adapters=self.loop.adapters,
        )
        self.compile_structured = self._intake.compile_structured
        self._names = itertools.count(1)
        self._lock = self.transport.lock
        self._driver: object | None = None
        # Request id -> queue of the outputs for the `generate` or `stream` call that waits for it.
        self._boxes: dict[str, deque[RequestOutput]] = {}
        if config.compile_runner:
            with _bar("compiling", quiet=config.silent_mode) as bar:
                in_background = config.compile_in_background and self.role == "alone"
                if in_background and isinstance(self.loop, EngineLoop):
                    self.loop.compile_first(bar)
                else:
                    self.loop.compile_all(bar)
        self._disk: DiskPages | None = None
        if config.prefix_cache_directory is not None:
            most = int(config.prefix_cache_directory_size * 2**30)
            self._disk = DiskPages(config.prefix_cache_directory, most)
            for loop in self._loops:
                self._disk.read(loop, self.transport)
                loop.store_pages = self._disk.write
        if not config.silent_mode:
            logger.info("%s: %s", self.model_name, self.describe())

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def set_source(self, directory: Path) -> None:
        """Set the directory of the weights, and its certificate."""
        self.directory = directory
        self._facts = replace(self._facts, certificate=certificate_summary(directory))

    def describe(self) -> str:
        """Return a one-line summary of the engine's sizes."""
        runner, limits = self.loop.runner, self.loop.scheduler.limits
        with native.chosen_by(runner.model.config):
            kernels = native.describe()
        replicas = len(self.replica_stats())
        prefix = f"{replicas} replicas, each with " if replicas > 1 else ""
        return (
            f"{prefix}{describe_dtypes(runner.model)}, {runner.describe()}, up to "
            f"{limits.max_num_seqs} sequences of {limits.max_model_len} tokens, "
            f"{limits.token_budget} tokens per step; {kernels}"
        )

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: RequestParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request. `step` returns its outputs.

        Args:
            request_id: id, unique among the unfinished requests.
            prompt: text, or token ids.
            params: `SamplingParams()` by default; `PoolingParams` for a pooled vector.
            options: see `RequestOptions`.

        Raises:
            ConfigError: the request can never run, its id is in use, or its adapter is not loaded.
        """
        self.execute(self.prepare(request_id, prompt, params or SamplingParams(), **options))

    def prepare(
        self,
        request_id: str,
        prompt: PromptInput,
        params: RequestParams,
        **options: Unpack[RequestOptions],
    ) -> Add:
        """Validate and tokenize a request without queueing the request. Thread-safe."""
        check_request_keywords(options)
        return self._intake.prepare(request_id, prompt, params, **options)

    def check_prompt(self, prompt: PromptInput, max_tokens: int | None) -> CheckedPrompt:
        """Tokenize and check a prompt; `prepare` accepts the result. Thread-safe.

        Args:
            prompt: text, or token ids.
            max_tokens: requested number of tokens; None = the free part of the context.

        Raises:
            ContextLengthError: the prompt does not fit the context.
            TokenIdError: a token id is outside the vocabulary.
        """
        return self._intake.check_prompt(prompt, max_tokens)

    def embedded_prompt(
        self, embeds: Float[np.ndarray, "n d"]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Return the token ids and the `encoder_inputs` of a prompt of embeddings. Thread-safe.

        Args:
            embeds: see `EmbeddedPrompts.prompt`.

        Raises:
            ConfigError: see `EmbeddedPrompts.prompt`; or `enable_prompt_embeds` is off.
        """
        items = self.loop.runner.items
        if not isinstance(items, EmbeddedPrompts):
            raise ConfigError(
                "this engine does not accept prompts of embeddings: start the engine with "
                "enable_prompt_embeds (--enable-prompt-embeds), or send text or token ids"
            )
        return items.prompt(embeds)

    def execute(self, command: Command) -> None:
        """Execute a command before the next step; see `ed_esurge.core.commands`."""
        with self._lock:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        self.loop.execute(self.transport.send(command, self.loop.runner))

    def abort_request(self, request_id: str) -> bool:
        """Abort a request; `step` returns its last output. Return False for an unknown id."""
        with self._lock:
            is_known = request_id in self.loop
            self._execute(Abort(request_id))
            return is_known

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do or outputs to return."""
        return bool(self.loop.open_requests or self.loop.backlog)

    def unfinished_requests(self) -> list[str]:
        """Return the ids of the waiting and running requests."""
        return self.loop.open_requests

    def step(self) -> list[RequestOutput]:
        """Run one step for all requests and return the new outputs (`RequestOutput.delta`).

        Outputs of active `generate` and `stream` calls go to those calls instead. A failure of one
        request ends that request with the finish reason "error". A raised error concerns all
        requests.

        Raises:
            EasyDeLError: the weights were dropped (see `weights`), or are not finite.
        """
        with self._lock:
            self.transport.send_step()
            unclaimed_outputs = []
            for output in self.loop.step():
                self._boxes.get(output.request_id, unclaimed_outputs).append(output)
            return unclaimed_outputs

    # ---- the simple interface

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_name: str | Sequence[str | None] | None = None,
        encoder_inputs: Sequence[Sequence[EncoderInput]] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate completions for prompts in one batch. Several threads may call this method.

        Args:
            prompts: one prompt or a list of prompts, each text or token ids.
            sampling_params: sampling options for all prompts, or one per prompt.
            lora_name: name of the loaded LoRA adapter for all prompts, or one name per prompt;
                None = no adapter.
            encoder_inputs: inputs of the model's encoder for each prompt, such as images; see
                `encoder_items.placed_items`.
            use_tqdm: whether to show a progress bar.

        Returns:
            one output per prompt, in the order of the prompts.
        """
        many = list_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        else:
            params = list(sampling_params)
        if lora_name is None or isinstance(lora_name, str):
            adapters: list[str | None] = [lora_name] * len(many)
        else:
            adapters = list(lora_name)
        inputs: list[Sequence[EncoderInput]] = [()] * len(many)
        if encoder_inputs is not None:
            inputs = list(encoder_inputs)
        lists = (
            ("sampling parameters", params),
            ("lora_name", adapters),
            ("encoder_inputs", inputs),
        )
        for name, values in lists:
            if len(values) != len(many):
                raise ConfigError(f"{len(many)} prompts but {len(values)} {name}")
        return self._complete(many, params, adapters, inputs, use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_name: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Pool the hidden states of prompts in one batch. Each output has a vector in `pooled`.

        Args:
            prompts: one prompt or a list of prompts, each text or token ids.
            pooling_params: options for all prompts, or for each prompt; default
                `PoolingParams()`.
            lora_name: name of the loaded LoRA adapter for all prompts; None = no adapter.
            use_tqdm: whether to show a progress bar.
        """
        many = list_prompts(prompts)
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            params = [pooling_params or PoolingParams()] * len(many)
        else:
            params = list(pooling_params)
        if len(params) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(params)} pooling parameters")
        adapters = [lora_name] * len(many)
        return self._complete(many, params, adapters, [()] * len(many), use_tqdm)

    def _complete(
        self,
        prompts: Sequence[PromptInput],
        params: Sequence[RequestParams],
        adapters: Sequence[str | None],
        inputs: Sequence[Sequence[EncoderInput]],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        names = [self._name() for _ in prompts]
        adds = [
            self.prepare(name, prompt, request_params, lora_name=adapter, encoder_inputs=items)
            for name, prompt, request_params, adapter, items in zip(
                names, prompts, params, adapters, inputs, strict=True
            )
        ]
        outputs: dict[str, RequestOutput] = {}
        with _bar("prompts", quiet=not use_tqdm) as bar:
            bar.total = len(names)
            for delta in self._follow(adds):
                if delta.request_id in outputs:
                    outputs[delta.request_id].add(delta)
                else:
                    delta.delta = False
                    outputs[delta.request_id] = delta
                bar.update(int(delta.finished))
        return [outputs[name] for name in names]

    def replay(
        self,
        output: RequestOutput | LoggedRequest,
        sampling_params: SamplingParams | None = None,
        *,
        lora_name: str | None = None,
    ) -> RequestOutput:
        """Run a request again with the prompt and the seed of its output.

        The tokens are the same. With `batch_invariant` the log-probabilities are bitwise equal,
        too. The output may come from a file or another process.

        Args:
            output: complete output, or any delta, of a request that samples; or its entry in a log.
            sampling_params: sampling options of the request. An entry in a log contains them.

        Raises:
            ConfigError: the sampling options of an output are missing.
            lora_name: name of the request's LoRA adapter.
        """
        params = sampling_params or getattr(output, "sampling_params", None)
        if params is None:
            raise ConfigError("replay(output) needs the sampling options: give sampling_params=")
        params = params.replace(seed=output.seed)
        return self.generate(output.prompt_token_ids, params, lora_name=lora_name)[0]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """Return an iterator over the deltas of one request.

        The first read queues the request. Closing the iterator aborts the request. For the options
        see `RequestOptions`.
        """
        params = sampling_params or SamplingParams()
        deltas = self._follow([self.prepare(self._name(), prompt, params, **options)])
        return accumulate_texts(deltas)

    @overload
    def chat(
        self,
        messages: _Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **template: Any,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: _Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **template: Any,
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: _Messages,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        lora_name: str | None = None,
        **template: Any,
    ) -> RequestOutput | Iterator[RequestOutput]:
        """Generate the next message of a conversation.

        Args:
            messages: list of `{"role": …, "content": …}`.
            sampling_params: sampling options; default `SamplingParams()`.
            stream: whether to return an iterator over the deltas, as `stream` does.
            lora_name: name of the loaded LoRA adapter; None = no adapter.
            template: options of the tokenizer's `apply_chat_template` (`tools`, …), and
                `chat_template`: Jinja text that replaces the template of the tokenizer.

        Raises:
            ConfigError: the template and `apply_chat_template` read no option of this name.
        """
        chat = ChatTemplate(self.tokenizer, template.pop("chat_template", None))
        chat.check_options(template)
        ids = chat.token_ids(messages, **template)
        if stream:
            return self.stream(ids, sampling_params, lora_name=lora_name)
        return self.generate(ids, sampling_params, lora_name=lora_name)[0]

    def _follow(self, adds: Sequence[Add]) -> Iterator[RequestOutput]:
        """Queue requests and step until they finish. Other outputs are kept for `step`."""
        box: deque[RequestOutput] = deque()
        waiting = {add.request_id for add in adds}
        try:
            with self._lock:
                for add in adds:
                    self._boxes[add.request_id] = box
                    self._execute(add)
            while waiting:
                with self._lock:
                    # A step of another thread may have filled the box.
                    if not box:
                        if self.loop.paused:
                            raise EasyDeLError("the engine is paused: call resume() first")
                        self.loop.backlog = self.step() + self.loop.backlog
                    ready = [*box]
                    box.clear()
                for output in ready:
                    if output.finished:
                        waiting.discard(output.request_id)
                    yield output
        finally:
            with self._lock:
                for name in waiting:
                    self._execute(Abort(name))
                mine = {add.request_id for add in adds}
                other_outputs = [out for out in self.loop.backlog if out.request_id not in mine]
                self.loop.backlog = other_outputs
                for name in mine:
                    self._boxes.pop(name, None)

    def _name(self) -> str:
        return f"eSurge-{next(self._names)}"

    # ---- ownership of `step`

    def claim(self, driver: object) -> bool:
        """Register the only caller of `step` until `release`. Return False if another driver is
        registered."""
        with self._lock:
            if self._driver is None:
                self._driver = driver
            return self._driver is driver

    def release(self, driver: object) -> None:
        """Undo `claim`. No effect if another driver is registered."""
        with self._lock:
            if self._driver is driver:
                self._driver = None

    # ---- termination

    @property
    def _loops(self) -> list[EngineLoop]:
        loop = self.loop
        return [*loop.loops] if isinstance(loop, Replicas) else [loop]

    def store_pages(self, most_bytes: int | None = None) -> int:
        """Write pages of the prefix cache to `prefix_cache_directory`, if set; see `StorePages`.

        Returns:
            the number of new files of this process.
        """
        if self._disk is None:
            return 0
        with self._lock:
            initial_count = self._disk.written
            self._execute(StorePages(most_bytes))
            return self._disk.written - initial_count

    def terminate(self) -> None:
        """Abort all requests and free the pages. The engine cannot be used afterwards."""
        self.store_pages()
        for loop in self._loops:
            loop.runner.stop_compiling()
        with self._lock:
            for name in self.loop.open_requests:
                self._execute(Abort(name))
            self._execute(Pause())
            self.transport.end()

    def beat(self) -> None:
        """Send a heartbeat to the other processes, if any. The driver of the engine calls this
        method about once per idle second."""
        with self._lock:
            self.transport.beat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    def stats(self) -> dict[str, float]:
        """Return current metrics. Counters start at engine creation and cover all replicas."""
        return self.loop.stats()

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the metrics of each replica; one entry without data parallelism."""
        return self.loop.replica_stats()


def _bar(label: str, *, quiet: bool) -> tqdm[NoReturn]:
    """Create a progress bar on stderr. It is disabled if stderr is not a terminal."""
    return tqdm(desc=label, disable=True if quiet else None)
