"""A value head beside a causal model: the expected return before each token.

The head is one more part of the module that learns, under the name `value_head`, so optimizers,
checkpoints, meshes and rules over names treat it as any other. The causal model itself does not
know of it: whoever generates, saves or serves sees the model without the head.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.distributed import on_host
from ed_infra.errors import CheckpointError
from ed_models.protocol import LanguageModel
from flax import nnx
from jaxtyping import Array, Float
from safetensors.numpy import load_file, save_file

from ed_trainers.rollout import Weights

NAME = "value_head"
#: Beside the weights of a saved model.
FILE = "value_head.safetensors"


class ValueHead(nnx.Module):
    """Hidden states to values, in float32; it begins at 0.

    Args:
        features: d.
    """

    def __init__(self, features: int):
        self.kernel = nnx.Param(jnp.zeros((features, 1), jnp.float32), axes=("embed", None))
        self.bias = nnx.Param(jnp.zeros((1,), jnp.float32), axes=(None,))

    def __call__(self, hidden: Float[Array, "b s d"]) -> Float[Array, "b s"]:
        """The value of each position."""
        return (hidden.astype(jnp.float32) @ self.kernel[...] + self.bias[...])[..., 0]


def with_value_head(model: LanguageModel, directory: str | Path | None = None) -> LanguageModel:
    """A module that shares the variables of a model, and has a value head beside them.

    Args:
        model: the causal model.
        directory: where a head was saved; None begins at 0.

    Raises:
        CheckpointError: there is no head, or it is of another width.
    """
    head = ValueHead(model.head().weight.shape[0])
    if directory is not None:
        _read(head, Path(directory) / FILE)
    whole: Any = copy.copy(model)
    whole.value_head = head
    nnx.update(head, nnx.state(whole.shard_model().value_head))
    return whole


def value_head(model: LanguageModel) -> ValueHead:
    """The head of a module that `with_value_head` made."""
    return cast(Any, model).value_head


def without_value_head(model: LanguageModel) -> LanguageModel:
    """The causal model alone; it shares the variables. One without a head is returned as it is."""
    if not hasattr(model, NAME):
        return model
    plain: Any = copy.copy(model)
    del plain.value_head
    return plain


def split_with_head(model: LanguageModel) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Take a model with a head apart as it takes itself apart; the head learns in any case.

    A model with adapters alone learns these, and would leave the head among what is frozen.
    """
    graphdef, params, other = model.split_module()
    rest = nnx.to_flat_state(other)
    head = [(path, variable) for path, variable in rest if path[0] == NAME]
    if not head:
        return graphdef, params, other
    kept = [(path, variable) for path, variable in rest if path[0] != NAME]
    learned = nnx.from_flat_state([*nnx.to_flat_state(params), *head])
    return graphdef, learned, nnx.from_flat_state(kept)


class PolicyWeights(Weights):
    """Lent weights of a model with a head, as those of the causal model alone."""

    def __init__(self, whole: Weights):
        self._whole, self.version = whole, whole.version
        self.graphdef = nnx.graphdef(cast(nnx.Module, self.model))

    @property
    def model(self) -> LanguageModel:
        """See `Weights.model`."""
        return without_value_head(self._whole.model)

    @property
    def state(self) -> nnx.State:
        """See `Weights.state`."""
        return nnx.state(cast(nnx.Module, self.model))

    def end(self) -> None:
        """See `Weights.end`."""
        self._whole.end()


def save_value_head(model: LanguageModel, directory: Path) -> None:
    """Write the head beside a saved model, as torch lays out a linear layer: weight [1, d]."""
    head = value_head(model)
    weight, bias = (on_host(variable[...]) for variable in (head.kernel, head.bias))
    if jax.process_index() == 0:
        tensors = {f"{NAME}.weight": np.ascontiguousarray(weight.T), f"{NAME}.bias": bias}
        save_file(tensors, directory / FILE)


def _read(head: ValueHead, file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(
            f"there is no {file}: value_head names the directory of a model that ppo saved; leave "
            "it out, and the head begins at 0"
        )
    saved = load_file(file)
    weight, wanted = saved[f"{NAME}.weight"].T, head.kernel.shape
    if weight.shape != wanted:
        raise CheckpointError(
            f"{file} is the value head of a model with {weight.shape[0]} features, this one has "
            f"{wanted[0]}: leave it out, and the head begins at 0"
        )
    head.kernel.set_value(jnp.asarray(weight))
    head.bias.set_value(jnp.asarray(saved[f"{NAME}.bias"]))
