"""Methods of an engine that control its weights, memory, adapters and processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ed_infra.errors import ConfigError
from ed_models.adapters.peft import read_adapter
from ed_models.adapters.slots import slot_values
from ed_models.adapters.token_tables import check_token_tables
from ed_models.adapters.values import Adapter, convert_to_plain, get_adapter
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import (
    Command,
    DropWeights,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from ed_esurge.engine.assembly import Loop
from ed_esurge.engine.transport import ProcessRole, Transport
from ed_esurge.model import get_platform, over_processes
from ed_esurge.runner.weights import ServedWeights


class EngineControl:
    """Base class of `eSurge`: the methods that do not serve requests.

    They must be called in the thread of the engine.

    Attributes:
        config: the engine's options.
        loop: executes the commands.
        transport: connection to the other processes of the engine.
    """

    config: EngineConfig
    loop: Loop
    transport: Transport

    @abstractmethod
    def execute(self, command: Command) -> None:
        """Execute a command before the next step; see `ed_esurge.core.commands`."""

    # ---- weights and memory

    def memory_bytes(self) -> int:
        """Return the bytes of weights, adapter slots, pages and states over all devices; 0 while
        the engine sleeps."""
        return self.loop.memory_bytes()

    @property
    def platform(self) -> str:
        """The platform of the engine's devices: `cpu`, `gpu` or `tpu`."""
        return get_platform(self.loop.runner.model)

    def drop_memory(self) -> None:
        """Abort all requests, and free weights and pages. The engine cannot be used afterwards."""
        self.loop.runner.stop_compiling(wait=False)
        self.execute(Sleep(keep_weights=False))

    def update_model_weights(self, model_or_state: LanguageModel | nnx.State) -> None:
        """Replace the served weights by a copy of other weights before the next step.

        Unfinished requests keep their tokens, and their keys and values are recomputed. The prefix
        cache is cleared. Nothing is compiled. The caller may change or donate its arrays
        afterwards.

        Args:
            model_or_state: a model of the same architecture, in any layout, or its state.

        Raises:
            ConfigError: the structure or a shape differs.
        """
        self.execute(UpdateWeights(model_or_state))

    @contextmanager
    def weights(self, model_or_state: LanguageModel | nnx.State) -> Iterator[Self]:
        """Serve the caller's arrays without a copy within a `with` block.

        At the end of the block the engine releases the arrays, so a train step may donate them.
        The engine then has no weights: `step` raises an error until `update_model_weights` or the
        next block. Arrays of another dtype, sharding or layout are converted, which copies them.

        Args:
            model_or_state: see `update_model_weights`.
        """
        self.execute(UpdateWeights(model_or_state, copy=False))
        try:
            yield self
        finally:
            self.execute(DropWeights())

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, including its pages in host memory.

        Unfinished requests keep their tokens, and their keys and values are recomputed.
        """
        self.execute(ResetPrefixCache())

    def pause(self) -> None:
        """Stop the steps. With `destroy_pages_on_pause` the memory of the pages is freed.
        Unfinished requests stay queued and are recomputed after `resume`."""
        self.execute(Pause(free_pages=self.config.destroy_pages_on_pause))

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, by `pause` or `sleep`."""
        return self.loop.paused

    def resume(self) -> None:
        """Resume after `pause`."""
        self.execute(Resume())

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of pages and weights until `wake_up`.

        Unfinished requests stay queued and are recomputed. Adapters stay in device memory.

        Args:
            level: 1 moves the weights to host memory (no effect on a CPU). 2 drops the weights, so
                that `update_model_weights` is required before `wake_up`.

        Raises:
            ConfigError: the level is not 1 or 2.
        """
        self.execute(Sleep(keep_weights=check_level(level) == 1))

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: between `sleep` and `wake_up`."""
        return self.loop.asleep

    def wake_up(self) -> None:
        """Resume after `sleep`. Nothing is compiled.

        Raises:
            ConfigError: the engine has no weights.
        """
        self.execute(WakeUp())

    # ---- adapters

    def load_lora_adapter(self, name: str, source: str | Path | nnx.Module | Adapter) -> None:
        """Load a LoRA adapter under a name. Nothing is compiled.

        Args:
            name: value of `lora_name` in requests that use the adapter.
            source: a directory in PEFT's layout, or a model with the adapter on its layers.

        Raises:
            ConfigError: the name is in use, `max_loras` adapters are loaded, or the adapter cannot
                be served together with others: its rank exceeds `max_lora_rank`, or it changes
                layers outside of `lora_targets` (the message lists the layers).
            CheckpointError: the directory cannot be read, or contains an adapter of another model.
        """
        self.execute(loading(self.loop, name, source))

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter. New requests for it are rejected. Unfinished requests continue to use
        it, and its memory is reused after they end.

        Raises:
            ConfigError: no adapter with this name is loaded.
        """
        self.execute(UnloadAdapter(name))

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters, in loading order."""
        return list(self.loop.adapters)

    # ---- processes

    @property
    def role(self) -> ProcessRole:
        """The role of this process among the processes of the model; `leads` accepts requests."""
        return self.transport.role

    def follow(self) -> None:
        """Repeat the steps of the first process until its `terminate`. Call this method in every
        other process.

        Raises:
            ConfigError: there are no other processes, or this is the first process.
        """
        self.transport.follow(self.loop)

    @contextmanager
    def together(self) -> Iterator[Self]:
        """Return a context in which every process makes the same calls and receives the same
        outputs.

        No commands are sent, so weights that are sharded over all processes may be used directly.
        The context has no effect if all devices of the model belong to this process.
        """
        self.transport.together = True
        try:
            yield self
        finally:
            self.transport.together = False


def loading(loop: Loop, name: str, source: str | Path | nnx.Module | Adapter) -> LoadAdapter:
    """Read and validate an adapter, and return the command that loads it. Thread-safe.

    Args:
        loop: the loop of the engine.
        name: name of the adapter in requests.
        source: a directory in PEFT's layout, a model with the adapter on its layers, or adapter
            values by canonical matrix names.

    Raises:
        ConfigError: the engine serves no adapters, the name is in use, or the adapter cannot be
            served together with others.
        CheckpointError: see `ed_models.adapters.peft.read_adapter`.
    """
    loop.adapters.check_new(name)
    model: Any = loop.runner.model
    origin: str | None = None
    if isinstance(source, nnx.Module):
        adapter: Adapter = get_adapter(source)
        if not adapter:
            raise ConfigError(
                f"the model for the adapter {name!r} has no active adapter: select one with "
                "set_adapter(name)"
            )
    elif isinstance(source, str | Path):
        check_token_tables(model, source)
        adapter, origin = read_adapter(_get_model_with_values(loop), source), str(source)
    else:
        adapter = source
    adapter = convert_to_plain(adapter)
    slot_values(model, adapter)
    return LoadAdapter(name, adapter, origin)


def _get_model_with_values(loop: Loop) -> Any:
    """Return the model with its arrays, which PEFT's adapters of PiSSA and OLoRA depend on; without
    arrays if other processes have parts of them, or if the weights are absent."""
    model, weights = loop.runner.model, loop.runner.weights
    if isinstance(weights, ServedWeights) and weights.there and not over_processes(model):
        return weights.merge_leaves(weights.leaves)
    return model


def check_level(level: int) -> int:
    """Return a level of `sleep` after validation.

    Raises:
        ConfigError: the level is not 1 or 2.
    """
    if level not in (1, 2):
        raise ConfigError(f"level={level!r} is invalid: use 1 (keeps the weights) or 2")
    return level
