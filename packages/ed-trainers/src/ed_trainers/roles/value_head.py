"""A value head of a causal model: the expected return before each token.

The head is a part of the trained module with the name `value_head`, so optimizers, checkpoints,
meshes and rules over names treat it like any other part. Generation, saving and serving use the
model without the head.

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

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.online import PPOArguments
from ed_trainers.roles.extension import Extension

NAME = "value_head"
#: File of the head in the directory of a saved model.
VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nnx.Module):
    """A linear layer from hidden states to values, in float32, with initial values of 0.

    Args:
        features: d.
    """

    def __init__(self, features: int):
        self.kernel = nnx.Param(jnp.zeros((features, 1), jnp.float32), axes=("embed", None))
        self.bias = nnx.Param(jnp.zeros((1,), jnp.float32), axes=(None,))

    def __call__(self, hidden: Float[Array, "b s d"]) -> Float[Array, "b s"]:
        """Return the value of each position."""
        return (hidden.astype(jnp.float32) @ self.kernel[...] + self.bias[...])[..., 0]


def with_value_head(model: LanguageModel, directory: str | Path | None = None) -> LanguageModel:
    """Return a module with the variables of a model and a value head.

    Args:
        model: the causal model.
        directory: directory of a saved head; None starts with values of 0.

    Raises:
        CheckpointError: the directory has no head, or its width differs.
    """
    head = ValueHead(model.head().weight.shape[0])
    if directory is not None:
        _read(head, Path(directory) / VALUE_HEAD_FILE)
    extended_model: Any = copy.copy(model)
    extended_model.value_head = head
    nnx.update(head, nnx.state(extended_model.shard_model().value_head))
    return extended_model


def value_head(model: LanguageModel) -> ValueHead:
    """Return the head of a module of `with_value_head`."""
    return cast(Any, model).value_head


def without_value_head(model: LanguageModel) -> LanguageModel:
    """Return the causal model without its head; it shares the variables."""
    if not hasattr(model, NAME):
        return model
    base_model: Any = copy.copy(model)
    del base_model.value_head
    return base_model


def split_with_head(model: LanguageModel) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Split a model with a head like `split_module`; the head is always trained.

    `split_module` of a model with adapters would put the head among the frozen variables.
    """
    graphdef, params, other_variables = model.split_module()
    flat_variables = nnx.to_flat_state(other_variables)
    head = [(path, variable) for path, variable in flat_variables if path[0] == NAME]
    if not head:
        return graphdef, params, other_variables
    remaining_variables = [(path, variable) for path, variable in flat_variables if path[0] != NAME]
    learned = nnx.from_flat_state([*nnx.to_flat_state(params), *head])
    return graphdef, learned, nnx.from_flat_state(remaining_variables)


def save_value_head(model: LanguageModel, directory: Path) -> None:
    """Write the head to the directory of a saved model, in the layout of torch: weight [1, d]."""
    head = value_head(model)
    weight, bias = (on_host(variable[...]) for variable in (head.kernel, head.bias))
    if jax.process_index() == 0:
        tensors = {f"{NAME}.weight": np.ascontiguousarray(weight.T), f"{NAME}.bias": bias}
        save_file(tensors, directory / VALUE_HEAD_FILE)


def _read(head: ValueHead, file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(
            f"there is no {file}: value_head names the directory of a model saved by ppo; omit it "
            "to start with values of 0"
        )
    saved = load_file(file)
    weight, expected_shape = saved[f"{NAME}.weight"].T, head.kernel.shape
    if weight.shape != expected_shape:
        raise CheckpointError(
            f"{file} is the value head of a model with {weight.shape[0]} features, the model has "
            f"{expected_shape[0]}: omit value_head to start with values of 0"
        )
    head.kernel.set_value(jnp.asarray(weight))
    head.bias.set_value(jnp.asarray(saved[f"{NAME}.bias"]))


def _attach(model: LanguageModel, arguments: TrainingArguments) -> LanguageModel:
    directory = arguments.value_head if isinstance(arguments, PPOArguments) else None
    return with_value_head(model, directory)


#: The role "value": a value head of the learner.
VALUE_HEAD = Extension(
    attach=_attach,
    detach=without_value_head,
    split=split_with_head,
    owns_path=lambda path: path[0] == NAME,
    save=save_value_head,
)
