"""Several adapters of one model, by name: one at a time is on its layers, or is merged into them.

The adapter on the layers learns, is saved and computes. The others wait in host memory, as the same
values that files and the engine's slots hold (`ed_models.adapters.values`), and cost a step nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
from ed_infra import parameter_names
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.specs import LoraSpec
from flax import nnx

from ed_models.adapters.lora import apply_lora, has_lora, merge_lora, remove_lora
from ed_models.adapters.peft import read_adapter
from ed_models.adapters.values import Adapter, adapter_of, put_adapter

ModelT = TypeVar("ModelT", bound="EasyAdapterMixin")

#: PEFT's name of an adapter that nobody named.
DEFAULT = "default"


@dataclass(frozen=True, eq=False)
class Merged:
    """An adapter that lies in the weights, and what they were without it.

    Attributes:
        name, adapter: which.
        graphdef: of the base.
        matrices: storage path -> variable of the base, of those that changed.
    """

    name: str
    adapter: Adapter
    graphdef: nnx.GraphDef
    matrices: Mapping[tuple[Any, ...], nnx.Variable]


@dataclass(frozen=True, eq=False)
class NamedAdapters:
    """What a model knows of its adapters besides the one on its layers; a static part of it.

    Attributes:
        active: name of the one on the layers.
        waiting: the others.
        merged: the one in the weights.
    """

    active: str = DEFAULT
    waiting: Mapping[str, Adapter] = field(default_factory=dict)
    merged: Merged | None = None


class EasyAdapterMixin(nnx.Module):
    """Low-rank adapters of a model; each method returns another model, sharded as this one."""

    named_adapters: NamedAdapters = NamedAdapters()

    @abstractmethod
    def shard_model(self: ModelT) -> ModelT:
        """Place every parameter on the mesh."""

    @property
    def lora_is_enabled(self) -> bool:
        """Whether layers have adapters."""
        return has_lora(self)

    @property
    def active_adapter(self) -> str | None:
        """Name of the adapter on the layers; None = none, so that the base computes."""
        return self.named_adapters.active if has_lora(self) else None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of all adapters: that on the layers or in the weights, and those that wait."""
        merged = self.named_adapters.merged
        first = self.active_adapter if merged is None else merged.name
        waiting = [name for name in self.named_adapters.waiting if name != first]
        return (*([] if first is None else [first]), *waiting)

    # Putting on.

    def apply_lora(
        self: ModelT,
        spec: LoraSpec | Mapping[LoraSpec, list[str]],
        *,
        name: str = DEFAULT,
        seed: int = 0,
    ) -> ModelT:
        """Put a new adapter on layers; it alone learns from then on. See `adapters.apply_lora`.

        Args:
            name: another than the model's adapters have; those wait from then on.

        Raises:
            ConfigError: the name is taken, a target matches no layer, or an adapter is merged.
        """
        base, waiting = self._set_aside(new=name)
        return base._with(apply_lora(base, spec, key=jax.random.key(seed)), name, waiting)

    def apply_lora_to_layers(
        self: ModelT, lora_rank: int, lora_pattern: str | None = None, *, seed: int = 0
    ) -> ModelT:
        """Put adapters of a rank on the layers whose canonical names a pattern matches.

        Args:
            lora_rank: r; the scale is 1.
            lora_pattern: regular expression; None = every linear layer but the head.
            seed: of the random numbers.
        """
        return self.apply_lora(LoraSpec(rank=lora_rank, targets=lora_pattern), seed=seed)

    def load_adapter(self: ModelT, directory: str | Path, *, name: str = DEFAULT) -> ModelT:
        """Put the adapter of a directory in PEFT's layout on the layers, under a name.

        Raises:
            CheckpointError: see `ed_models.adapters.peft.read_adapter`.
            ConfigError: the name is taken, or an adapter is merged.
        """
        base, waiting = self._set_aside(new=name)
        return base._with(put_adapter(base, read_adapter(base, directory)), name, waiting)

    def set_adapter(self: ModelT, name: str | None) -> ModelT:
        """Put the adapter of a name on the layers; None: no adapter, the base computes.

        Raises:
            ConfigError: there is no adapter of that name, or one is merged.
        """
        base, waiting = self._set_aside()
        if name is None:
            return base._with(base, DEFAULT, waiting)
        self._check_name(name)
        rest = {other: adapter for other, adapter in waiting.items() if other != name}
        return base._with(put_adapter(base, waiting[name]), name, rest)

    def delete_adapter(self: ModelT, name: str) -> ModelT:
        """Forget the adapter of a name; if it was on the layers, the base computes.

        Raises:
            ConfigError: there is no adapter of that name, or one is merged.
        """
        self._check_name(name)
        base, waiting = self._set_aside()
        rest = {other: adapter for other, adapter in waiting.items() if other != name}
        active = self.active_adapter
        if active is None or active == name:
            return base._with(base, DEFAULT, rest)
        del rest[active]
        return base._with(self, active, rest)

    # Merging.

    def merge_adapter(self: ModelT, name: str | None = None, *, dequantize: bool = False) -> ModelT:
        """Put the change of an adapter into the weights, so that it costs no time.

        The base's matrices are kept beside (memory for the adapted matrices twice), and
        `unmerge_adapter` gives them back, to the bit.

        Args:
            name: which; None = the one on the layers.
            dequantize: quantized matrices that have adapters become plain ones.

        Raises:
            ConfigError: there is no such adapter, one is merged, or a matrix is quantized.
        """
        model = self if name is None or name == self.active_adapter else self.set_adapter(name)
        if not has_lora(model):
            self._check_unmerged()
            raise ConfigError(
                f"no adapter is on the layers: name one of {list(self.adapter_names)}"
                if self.adapter_names
                else "the model has no adapters"
            )
        named, adapter = model.named_adapters, adapter_of(model)
        graphdef, base = nnx.split(remove_lora(model))
        matrices = {
            path: variable
            for path, variable in nnx.to_flat_state(base)
            if not adapter.keys().isdisjoint(parameter_names.canonical(path))
        }
        merged = Merged(named.active, adapter, graphdef, matrices)
        changed = merge_lora(model, dequantize=dequantize)
        return model._with(changed, DEFAULT, named.waiting, merged)

    def unmerge_adapter(self: ModelT) -> ModelT:
        """Undo `merge_adapter`: the weights of the base to the bit, and the adapter on the layers.

        What the weights learned since then is lost.

        Raises:
            ConfigError: no adapter is merged, or the layers are stored otherwise since then.
        """
        merged = self.named_adapters.merged
        if merged is None:
            raise ConfigError("no adapter is merged into the weights (merge_adapter does that)")
        flat = dict(nnx.to_flat_state(nnx.state(self)))
        if any(path not in flat for path in merged.matrices):
            raise ConfigError(
                "the layers are stored otherwise than when the adapter was merged: give the model "
                "the layout that it had (to_layout)"
            )
        base = nnx.merge(merged.graphdef, nnx.from_flat_state({**flat, **merged.matrices}))
        adapted = put_adapter(base, merged.adapter)
        return self._with(adapted, merged.name, self.named_adapters.waiting)

    def unwrap_lora_to_layers(self: ModelT, *, dequantize: bool = False) -> ModelT:
        """Merge the adapter on the layers into the weights for good, and forget all adapters.

        Args:
            dequantize: quantized matrices that have adapters become plain ones.
        """
        return merge_lora(self, dequantize=dequantize).shard_model()

    # Parts.

    def _set_aside(self: ModelT, new: str | None = None) -> tuple[ModelT, dict[str, Adapter]]:
        """The base, and all adapters by name.

        Args:
            new: a name that must be free.
        """
        self._check_unmerged()
        active = self.active_adapter
        if new is not None and (not isinstance(new, str) or not new):
            raise ConfigError(f"the name of an adapter is a text, got {new!r}")
        if new is not None and new in self.adapter_names:
            raise ConfigError(
                f"the model has an adapter named {new!r}: give the new one another name (name=), "
                "merge that one (unwrap_lora_to_layers), or forget it (delete_adapter)"
            )
        waiting = dict(self.named_adapters.waiting)
        if active is None:
            return self, waiting
        return remove_lora(self), {active: adapter_of(self), **waiting}

    def _with(
        self: ModelT,
        model: ModelT,
        active: str,
        waiting: Mapping[str, Adapter],
        merged: Merged | None = None,
    ) -> ModelT:
        """The model, placed, with what it knows of other adapters."""
        placed = model.shard_model()
        placed.named_adapters = NamedAdapters(active, waiting, merged)
        return placed

    def _check_name(self, name: str) -> None:
        if name not in self.adapter_names:
            raise unknown_name("adapter", name, list(self.adapter_names))

    def _check_unmerged(self) -> None:
        merged = self.named_adapters.merged
        if merged is not None:
            raise ConfigError(
                f"the adapter {merged.name!r} is merged into the weights: take it out "
                "(unmerge_adapter) before adapters are put on, changed or forgotten"
            )
