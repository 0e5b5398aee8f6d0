"""LoRA adapters of an engine, by name: code shared by `eSurge` and `AsyncEngine`."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError
from ed_models.adapters.peft import read_adapter
from ed_models.adapters.slots import slot_values
from ed_models.adapters.values import Adapter, adapter_of
from flax import nnx

from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import Command, LoadAdapter, UnloadAdapter
from ed_esurge.engine.assembly import Loop


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
        adapter: Adapter = adapter_of(source)
        if not adapter:
            raise ConfigError(
                f"the model given for the adapter {name!r} has none on its layers: choose one with "
                "set_adapter(name)"
            )
    elif isinstance(source, str | Path):
        adapter, origin = read_adapter(model, source), str(source)
    else:
        adapter = source
    slot_values(model, adapter)
    return LoadAdapter(name, adapter, origin)


class ServesAdapters:
    """Adapter methods of an engine. They must be called in the thread of the engine."""

    loop: Loop

    @abstractmethod
    def execute(self, command: Command) -> None:
        """Execute a command before the next step."""

    def load_lora_adapter(self, name: str, source: str | Path | nnx.Module | Adapter) -> None:
        """Load a LoRA adapter under a name. Nothing is compiled.

        Args:
            name: value of `lora_name` in requests that use the adapter.
            source: a directory in PEFT's layout, or a model with the adapter on its layers.

        Raises:
            ConfigError: the name is in use, `max_loras` adapters are loaded, or the adapter cannot
                be served together with others: its rank exceeds `max_lora_rank`, it uses DoRA, or
                it changes layers outside of `lora_targets` (the message lists the layers).
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
