"""The engine interface that the server requires."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs


@runtime_checkable
class ServedEngine(Protocol):
    """What the server needs of an engine; `ed_esurge.engine.AsyncEngine` has it."""

    tokenizer: Any
    model_name: str
    max_model_len: int
    vocab_size: int
    config: EngineConfig

    @property
    def is_healthy(self) -> bool:
        """False when the engine's thread is dead or stuck in a step."""
        ...

    @property
    def is_sleeping(self) -> bool:
        """Whether the device is lent to others, so that no request can be answered."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Lend the device: 1 keeps the weights in host memory, 2 forgets them."""
        ...

    async def wake_up(self) -> None:
        """Take the device again."""
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request. Closing the iterator early aborts the request."""
        ...

    async def embed(
        self,
        prompt_token_ids: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> RequestOutput:
        """The pooled vector of one prompt; cancelling aborts the request."""
        ...

    async def load_lora_adapter(self, name: str, source: Path) -> None:
        """Serve a LoRA adapter under a name."""
        ...

    async def unload_lora_adapter(self, name: str) -> None:
        """Let no new request use an adapter."""
        ...

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """The loaded adapters."""
        ...

    def compile_structured(self, wanted: StructuredOutputs) -> Future[Any]:
        """Compile the grammar of a structured output. The result, or the call itself, raises a
        ConfigError for what is no grammar."""
        ...

    def replica_stats(self) -> Sequence[Mapping[str, float]]:
        """The numbers of each replica, which `metrics.EngineCollector` exports."""
        ...
