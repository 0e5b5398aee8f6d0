"""The engine interface that the server requires."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.engine.intake import CheckedPrompt, RequestOptions
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs


@runtime_checkable
class ServedEngine(Protocol):
    """An engine that a server can use. `ed_esurge.engine.AsyncEngine` implements the protocol.

    The engine of a vision-language model also has `input_names`, the names of the arrays that the
    model accepts, and `processor`, the processor of its checkpoint. Its `generate` accepts the
    keyword argument `encoder_inputs`.

    The engine of an audio-language model also has `recording_form`, the recordings that the model
    reads, and its `processor` is the feature extractor, or has one.

    An engine with the option `enable_prompt_embeds` also has `embedded_prompt`, which returns the
    token ids and the `encoder_inputs` of a prompt of embeddings.

    The engine of a model that generates no tokens also has `task`, the `TaskType` of the model. The
    engine of a classifier also has `labels`, a `LabelSet`, and its `embed` returns the logits. The
    engine of an embedding model also has `embedding_settings`, an `EmbeddingSettings`.

    An engine that can read other weights from a directory also has `load_weights`.

    The engine of a model for speech also has `transcribe` and `check`, see
    `ed_esurge.speech.SpeechEngine`.
    """

    @property
    def tokenizer(self) -> Any:
        """A `Tokenizer`, or None."""
        ...

    @property
    def model_name(self) -> str:
        """The default name of the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt plus completion."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The options of the engine."""
        ...

    @property
    def is_healthy(self) -> bool:
        """False if the thread of the engine is dead, or stuck in a step."""
        ...

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps and cannot answer requests."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Release the device memory. Level 1 keeps the weights in host memory, 2 drops them."""
        ...

    async def wake_up(self) -> None:
        """Resume after `sleep`."""
        ...

    def generate(
        self,
        prompt_token_ids: CheckedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of one request. Closing the iterator early aborts the request."""
        ...

    async def embed(
        self,
        prompt_token_ids: CheckedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the pooled vector of one prompt. Cancelling aborts the request."""
        ...

    async def load_lora_adapter(self, name: str, source: Path) -> None:
        """Load a LoRA adapter under a name."""
        ...

    async def unload_lora_adapter(self, name: str) -> None:
        """Reject new requests for an adapter."""
        ...

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters."""
        ...

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Any]:
        """Compile the grammar of a structured output.

        For an invalid grammar, the call or its result raises ConfigError.
        """
        ...

    def replica_stats(self) -> Sequence[Mapping[str, float]]:
        """Return the statistics of each replica for `metrics.EngineCollector`."""
        ...
