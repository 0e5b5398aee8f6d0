"""Other numbers of token rows: embeddings and heads get new rows, or lose the last ones.

New rows follow `resize_token_embeddings` of transformers 5. Legend: v tokens, n new tokens,
d features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.distributed import on_host
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger
from ed_layers.attention.mechanism import change_configurations
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from flax import nnx

from ed_models.checkpoints.quantized_tensors import encoded_as

M = TypeVar("M")


class TokenModel(Protocol):
    """A model with tables of tokens."""

    @property
    def config(self) -> EasyDeLBaseConfig:
        """The configuration."""
        ...

    @property
    def base_token_rows(self) -> int | None:
        """Rows of the checkpoint before rows were added; None = no rows were added."""
        ...


#: `(table [v, *d], n) -> [n, *d]`, float32.
NewRows = Callable[[np.ndarray, int], np.ndarray]

logger = get_logger(__name__)
#: Fields that count the rows of tables of tokens.
_FIELDS = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")
#: Fields with the configurations of language models.
_NESTED = ("text_config", "encoder", "decoder")
#: Factor on the covariance of new rows, and on the deviation of new biases, in transformers.
_SPREAD = 1e-9
_BLOCK = 2**13  # rows of a table that are converted to float32 at a time
_MOST_TOKENS = 2**24


def resize_token_rows(
    model: M,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *,
    mean_resizing: bool = True,
    seed: int = 0,
) -> M:
    """Return a model with another number of token rows.

    See `EasyDeLBaseModule.resize_token_embeddings`. The arrays of the model may be shapes
    (`jax.ShapeDtypeStruct`).
    """
    module = cast(Any, model)
    old = count_token_rows(module.config)
    size = _check_size(old if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
    if size == old:
        return model
    if module.adapter_names:
        raise ConfigError(
            f"the model has the adapters {list(module.adapter_names)}, and their shapes depend on "
            "the number of tokens: resize the embedding before you add or load adapters"
        )
    axes = find_token_axes(module)

    def resize(name: str, variable: nnx.Variable) -> Any:
        if name not in axes:
            return None
        rows = _choose_rows(module, variable, mean_resizing, seed)
        return _resize_value(variable.get_value(), axes[name], size, rows)

    copy = copy_with_values(module, resize)
    change_configurations(copy, lambda config: replace_token_rows(config, old, size))
    copy.base_token_rows = module.base_token_rows or old
    if has_arrays(copy):
        logger.info("the model has %d token rows instead of %d", size, old)
        return copy.shard_model()
    return copy


def copy_with_values(model: object, choose: Callable[[str, nnx.Variable], Any]) -> Any:
    """Return a copy of a model with other values of its variables, which are not placed yet.

    Args:
        choose: canonical name and variable -> the new value; None = the value stays.
    """
    graphdef, state = nnx.split(model)
    flat = list(nnx.to_flat_state(state))
    for i, (path, variable) in enumerate(flat):
        value = choose(parameter_names.canonical(path)[0], variable)
        if value is not None:
            flat[i] = path, variable.replace(value)
    with nnx.use_eager_sharding(False):
        return nnx.merge(graphdef, nnx.from_flat_state(flat))


def has_arrays(model: object) -> bool:
    """Return whether the variables of a model are arrays, and not shapes."""
    variables = (variable for _, variable in nnx.to_flat_state(nnx.state(model)))
    return not any(isinstance(v.get_value(), jax.ShapeDtypeStruct) for v in variables)


def count_token_rows(config: EasyDeLBaseConfig) -> int:
    """Return the number of rows of the embedding of a model.

    Raises:
        ConfigError: the model has no tokens.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        raise ConfigError(f"a model of type {config.model_type!r} has no embedding of tokens")
    return rows


def replace_token_rows(config: EasyDeLBaseConfig, old: int, size: int) -> EasyDeLBaseConfig:
    """Return a configuration, or a nested one, with another number of token rows."""
    changes: dict[str, Any] = {n: size for n in _FIELDS if getattr(config, n, None) == old}
    for name in _NESTED:
        nested = getattr(config, name, None)
        if isinstance(nested, EasyDeLBaseConfig):
            changes[name] = replace_token_rows(nested, old, size)
    if not changes:
        return config
    changed = config.replace(**changes)
    changed.name_or_path = config.name_or_path
    return changed


def find_token_axes(model: TokenModel) -> dict[str, int]:
    """Return canonical name -> axis of tokens, for the tables, heads and biases of tokens."""
    old = count_token_rows(model.config)
    larger = replace_token_rows(model.config, old, old + 1)
    old_shapes, new_shapes = _shapes(model, model.config), _shapes(model, larger)
    axes = {}
    for name, shape in old_shapes.items():
        for axis, (rows, more) in enumerate(zip(shape, new_shapes[name], strict=True)):
            if rows != more:
                axes[name] = axis
    return axes


def draw_rows(table: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Draw rows from a normal distribution with the mean and 1e-9 of the covariance of a table.

    As in transformers, the rows are the mean if the covariance is not positive definite.
    """
    total, width = table.shape
    mean = sum(block.sum(axis=0, dtype=np.float64) for block in _blocks(table)) / total
    mean = np.asarray(mean, np.float32)
    covariance = np.zeros((width, width), np.float32)
    for block in _blocks(table):
        centered = block - mean
        covariance += centered.T @ centered
    rows = np.broadcast_to(mean, (count, width))
    try:
        factor = np.linalg.cholesky(covariance * np.float32(_SPREAD / total))
    except np.linalg.LinAlgError:
        return rows
    noise = np.random.default_rng(seed).standard_normal((count, width), np.float32)
    return rows + noise @ factor.T


def _draw_biases(values: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    biases = values.astype(np.float32)
    noise = np.random.default_rng(seed).standard_normal(count, np.float32)
    return biases.mean() + _SPREAD * biases.std(ddof=1) * noise


def _draw_around_zero(table: np.ndarray, count: int, *, std: float, seed: int) -> np.ndarray:
    shape = (count, *table.shape[1:])
    return np.random.default_rng(seed).normal(0.0, std, shape).astype(np.float32)


def _fill_zeros(table: np.ndarray, count: int) -> np.ndarray:
    return np.zeros((count, *table.shape[1:]), np.float32)


def _choose_rows(model: TokenModel, variable: nnx.Variable, mean: bool, seed: int) -> NewRows:
    """Return the function for the new rows of a variable."""
    value = variable.get_value()
    is_parameter = isinstance(variable, nnx.Param) or isinstance(value, QArray)
    # The bias of a masked language model has two names in transformers, which fills it with zeros.
    is_shared = getattr(type(model), "model_task", None) == TaskType.MASKED_LM
    if not is_parameter or (value.ndim == 1 and (is_shared or not mean)):
        return _fill_zeros
    if mean:
        return partial(draw_rows if value.ndim == 2 else _draw_biases, seed=seed)
    std = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
    return partial(_draw_around_zero, std=std, seed=seed)


def _resize_value(value: Any, axis: int, size: int, new_rows: NewRows) -> Any:
    """Return an array, a quantized matrix or a shape with another number of rows."""
    if isinstance(value, QArray):
        dense_table = _resize_value(value.dense(), axis, size, new_rows)
        return encoded_as(jnp.asarray(dense_table), value)
    if isinstance(value, Simulated):
        raise ConfigError(
            "the embedding or the head simulates a format of quantization: resize the embedding "
            "before you quantize the model"
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, value.dtype)
    table = np.moveaxis(on_host(value), axis, 0)
    if size > len(table):
        added = new_rows(table, size - len(table)).astype(table.dtype)
        table = np.concatenate([table, added])
    return np.ascontiguousarray(np.moveaxis(table[:size], 0, axis))


def _blocks(table: np.ndarray) -> Any:
    for start in range(0, len(table), _BLOCK):
        yield table[start : start + _BLOCK].astype(np.float32)


def _shapes(model: TokenModel, config: EasyDeLBaseConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model with a configuration, by canonical name."""
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.eval_shape(lambda: cast(Any, type(model))(config, rngs=nnx.Rngs(0))))
    return {
        name: variable.get_value().shape[int(parameter_names.is_stacked(path)) :]
        for path, variable in nnx.to_flat_state(state)
        for name in parameter_names.canonical(path)
    }


def _check_size(size: int, multiple: int | None) -> int:
    for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", multiple)):
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
            raise ConfigError(f"{name}={value!r} is invalid: it must be 1 to {_MOST_TOKENS}")
    return size if multiple is None else -(-size // multiple) * multiple
