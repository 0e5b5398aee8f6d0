"""LoRA adapters of an engine, by name: what `eSurge` and `AsyncEngine` say of them alike."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError
from ed_models.adapter_slots import slot_values
from ed_models.adapter_values import Adapter, adapter_of
from ed_models.peft import read_adapter
from flax import nnx

from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import Command, LoadAdapter, UnloadAdapter
from ed_esurge.engine.assembly import Loop


def loading(loop: Loop, name: str, source: str | Path | nnx.Module | Adapter) -> LoadAdapter:
    """The command that loads an adapter; it is read and checked here, in any thread.

    Args:
        name: what requests will call it.
        source: a directory in PEFT's layout; a model that has the adapter on its layers; or what
            adapters learned, by canonical names of matrices.

    Raises:
        ConfigError: the engine serves no adapters, the name is taken, or the adapter cannot be
            served beside others.
        CheckpointError: see `ed_models.peft.read_adapter`.
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
    """The methods of an engine in whose thread they are called."""

    loop: Loop

    @abstractmethod
    def execute(self, command: Command) -> None:
        """Do what a command says before the next step."""

    def load_lora_adapter(self, name: str, source: str | Path | nnx.Module | Adapter) -> None:
        """Serve a LoRA adapter under a name from the next step on; nothing is compiled.

        Args:
            name: `lora_name` of the requests that use it.
            source: a directory in PEFT's layout; or a model that has the adapter on its layers.

        Raises:
            ConfigError: the name is taken, `max_loras` are loaded, or the adapter cannot be served
                beside others: a rank above `max_lora_rank`, DoRA, or layers without places (those
                are listed).
            CheckpointError: the directory cannot be read, or holds an adapter of another model.
        """
        self.execute(loading(self.loop, name, source))

    def unload_lora_adapter(self, name: str) -> None:
        """Let no new request use an adapter. Those that use it go on with it to their ends; its
        place is free for another one after that.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        self.execute(UnloadAdapter(name))

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """The loaded adapters, in the order in which they were loaded."""
        return list(self.loop.adapters)
