"""The memory of optimizer states, from the shapes of the parameters. No jax.

A moment has the sharding of its parameter. An array of the same rank, such as the scales of
eight-bit moments, has the sharding of the dimensions that it shares with the parameter. A factored
moment is replicated. A test compares every optimizer with `optax`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import get_matrix_shape, optimizer_settings

from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.tensors import DTYPE_SIZES, PlanTensor

#: Parameters with fewer values have float32 moments (`ed_trainers.optimizers.eight_bit`).
_SMALLEST = 4096
_TABLES = re.compile(r"(^|\.)(embed\w*|wte|wpe|lm_head|score)(\.|$)")

Bytes = Callable[["Moments", PlanTensor], int]


class Moments:
    """What the state of one optimizer needs for a parameter.

    Args:
        arguments: options of the trainer.
        param_dtype: dtype of the stored parameters.
        mesh: the mesh.
    """

    def __init__(self, arguments: TrainingArguments, param_dtype: str, mesh: PlanMesh) -> None:
        self.arguments, self.mesh = arguments, mesh
        self.low = DTYPE_SIZES[param_dtype] < 4
        self.has_masters = self.low and arguments.master_dtype is not None
        self.size = DTYPE_SIZES["float32" if self.has_masters else param_dtype]
        mu = arguments.tx_mu_dtype
        self.mu_size = self.size if mu is None else DTYPE_SIZES[mu]
        settings = optimizer_settings(arguments.optimizer, arguments.optimizer_kwargs)
        self.settings: dict[str, Any] = settings.model_dump()

    def of(self, tensor: PlanTensor) -> dict[str, int]:
        """Return the bytes on one device: masters, moments, and the mean of `ema_decay`."""
        shard = self.mesh.shard(tensor)
        return {
            "masters": 4 * shard if self.has_masters else 0,
            "moments": _OPTIMIZERS[self.arguments.optimizer](self, tensor),
            "ema": 4 * shard if self.arguments.ema_decay is not None else 0,
        }

    def get_full_size(self, tensor: PlanTensor) -> int:
        """Return the bytes of a moment like the parameter."""
        return self.size * self.mesh.shard(tensor)

    def first(self, tensor: PlanTensor) -> int:
        """Return the bytes of a first moment, whose dtype can be chosen."""
        return self.mu_size * self.mesh.shard(tensor)

    def count_shared(self, tensor: PlanTensor, *last: int) -> int:
        """Return the values on one device of an array with other last dimensions."""
        shape = (*tensor.shape[: len(tensor.shape) - len(last)], *last)
        # The mesh axes of trailing dimensions that are not split are omitted.
        dimensions = zip(self.mesh.parameter(tensor), tensor.shape, shape, strict=False)
        parts = math.prod(self.mesh.ways(entry) for entry, own, size in dimensions if own == size)
        return tensor.layers * math.prod(shape) // parts


def _get_shape(tensor: PlanTensor) -> tuple[int, ...]:
    """Return the shape of one array: without layers and experts."""
    return tensor.shape[1:] if tensor.axes[:1] == ("expert",) else tensor.shape


def _copies(tensor: PlanTensor) -> int:
    return tensor.size // math.prod(_get_shape(tensor))


def _adamw(state: Moments, tensor: PlanTensor) -> int:
    return state.first(tensor) + state.get_full_size(tensor)


def _lion(state: Moments, tensor: PlanTensor) -> int:
    return state.first(tensor)


def _eight_bit(moments: int) -> Bytes:
    def of(state: Moments, tensor: PlanTensor) -> int:
        shape, copies = _get_shape(tensor), _copies(tensor)
        if math.prod(shape) < _SMALLEST:
            return state.first(tensor) + (moments - 1) * state.get_full_size(tensor)
        block = min(int(state.settings["block_size"]), shape[-1])
        scales = state.count_shared(tensor, -(-shape[-1] // block))
        # One count for each array, because the arrays are updated separately.
        return moments * (state.mesh.shard(tensor) + 4 * scales) + 4 * copies

    return of


def _adafactor(state: Moments, tensor: PlanTensor) -> int:
    shape, copies = _get_shape(tensor), _copies(tensor)
    least = int(state.settings["min_dim_size_to_factor"])
    size = state.size
    if len(shape) >= 2 and sorted(shape)[-2] >= least:
        *_, second, first = sorted(shape)
        rows, columns = math.prod(shape) // first, math.prod(shape) // second
        return copies * (size * (rows + columns + 1) + 4)
    return state.get_full_size(tensor) + copies * (2 * size + 4)


def _is_matrix(tensor: PlanTensor) -> bool:
    shape = _get_shape(tensor)
    return len(shape) == 2 and "vocab" not in tensor.axes and not _TABLES.search(tensor.name)


def _muon(state: Moments, tensor: PlanTensor) -> int:
    return state.get_full_size(tensor) if _is_matrix(tensor) else _adamw(state, tensor)


def _muon_8bit(state: Moments, tensor: PlanTensor) -> int:
    return _eight_bit(1 if _is_matrix(tensor) else 2)(state, tensor)


def _dion(state: Moments, tensor: PlanTensor) -> int:
    if not _is_matrix(tensor):
        return _adamw(state, tensor)
    shorter = min(_get_shape(tensor))
    rank = min(shorter, math.ceil(shorter * state.settings["rank_fraction"]))
    return state.get_full_size(tensor) + 4 * state.count_shared(tensor, shorter, rank)


def _soap(state: Moments, tensor: PlanTensor) -> int:
    shape = _get_shape(tensor)
    moments = 2 * state.get_full_size(tensor)
    longest, is_vector = state.settings["max_precond_dim"], len(shape) < 2
    sides = get_matrix_shape(shape)
    selected = [size <= longest for size in sides]
    if is_vector:
        selected = [selected[0] and state.settings["precondition_1d"], False]
    sizes = [size if chosen else 1 for size, chosen in zip(sides, selected, strict=True)]
    if len(shape) == 2:
        values = sum(state.count_shared(tensor, size, size) for size in sizes)
    else:
        values = _copies(tensor) * sum(size**2 for size in sizes)
    return moments + 2 * 4 * values


def _kron(state: Moments, tensor: PlanTensor) -> int:
    shape, settings = _get_shape(tensor), state.settings
    size = DTYPE_SIZES[settings["dtype"]]
    blocks, factors = [], []
    for length in get_matrix_shape(shape):
        is_dense = len(shape) > 1 and length <= settings["max_size_dense"]
        side = min(settings["block_size"], length) if is_dense else length
        blocks.append(-(-length // side))
        factors.append(side**2 if is_dense else side)
    values = math.prod(blocks) * (size * sum(factors) + 8)
    return size * state.mesh.shard(tensor) + _copies(tensor) * (values + 4)


def _ademamix(state: Moments, tensor: PlanTensor) -> int:
    return 3 * state.get_full_size(tensor)


def _mars(state: Moments, tensor: PlanTensor) -> int:
    if len(_get_shape(tensor)) == 2:
        return 3 * state.get_full_size(tensor) + 4 * _copies(tensor)
    return _adamw(state, tensor)


def _rmsprop(state: Moments, tensor: PlanTensor) -> int:
    return state.get_full_size(tensor) * (1 + (state.settings["momentum"] is not None))


def _sgd(state: Moments, tensor: PlanTensor) -> int:
    return state.get_full_size(tensor) if state.settings["momentum"] is not None else 0


def _schedule_free(state: Moments, tensor: PlanTensor) -> int:
    return 2 * state.get_full_size(tensor)


_OPTIMIZERS: dict[str, Bytes] = {
    "adamw": _adamw,
    "adamw_8bit": _eight_bit(2),
    "lion": _lion,
    "lion_8bit": _eight_bit(1),
    "adafactor": _adafactor,
    "muon": _muon,
    "muon_8bit": _muon_8bit,
    "dion": _dion,
    "soap": _soap,
    "adopt": _adamw,
    "ademamix": _ademamix,
    "quad": _kron,
    "skew": _kron,
    "mars": _mars,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "schedule_free_adamw": _schedule_free,
}
