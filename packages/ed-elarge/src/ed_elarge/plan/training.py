"""The memory of a train step on one device. No jax.

Arguments (parameters, optimizer state, batch) follow exactly from shapes and shardings. Temporary
buffers are an estimate of the larger of two moments: the loss, and the backward pass of a layer.
`docs/plan.md` states the measured errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ed_elarge.plan import adapters
from ed_elarge.plan.activations import LayerValues
from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.optimizer import Moments
from ed_elarge.plan.settings import Training
from ed_elarge.plan.tensors import DTYPE_SIZES, ModelShapes, Tensor

#: Parts that are arguments of the step and exist between steps.
ARGUMENTS = ("parameters", "adapters", "masters", "moments", "ema", "batch")


@dataclass(frozen=True)
class Step:
    """The parts of a train step, in bytes on one device.

    Attributes:
        parts: part -> bytes. The parts after `ARGUMENTS` are temporary buffers.
        moment: when the temporary buffers are largest: "loss" or "layer".
    """

    parts: dict[str, int]
    moment: str

    @property
    def arguments(self) -> int:
        """Bytes of the arguments."""
        return sum(self.parts[name] for name in ARGUMENTS)

    @property
    def temporary(self) -> int:
        """Bytes of the temporary buffers."""
        return sum(self.parts.values()) - self.arguments


def step(settings: Training, shapes: ModelShapes, mesh: PlanMesh) -> Step:
    """Return the memory of a train step."""
    base = list(shapes.tensors)
    added = [*adapters.of(settings.lora, base)] if settings.lora is not None else []
    trained = added or base
    moments = Moments(settings.arguments, settings.param_dtype, mesh)
    of_adapters = Moments(settings.arguments, "float32", mesh)
    parts = dict.fromkeys(ARGUMENTS, 0)
    parts["parameters"] = sum(_bytes(t, settings.param_dtype) * mesh.shard(t) for t in base)
    parts["adapters"] = sum(4 * mesh.shard(t) for t in added)
    for tensor in trained:
        for name, size in (of_adapters if added else moments).of(tensor).items():
            parts[name] += size
    parts["batch"] = _batch(settings, mesh)
    gradients = sum(4 * mesh.shard(t) for t in trained)
    tokens = _tokens(settings, mesh)
    kept = _kept(settings, shapes, mesh, tokens)
    loss = _loss(settings, shapes, mesh, tokens)
    layer = _layer(settings, shapes, mesh, tokens, trained)
    parts["gradients"] = gradients * (2 if settings.accumulation > 1 else 1)
    parts["activations"] = kept
    moment = "loss" if loss >= layer else "layer"
    parts["logits and head"] = loss if moment == "loss" else 0
    parts["layer buffers"] = layer if moment == "layer" else 0
    return Step(parts, moment)


def _bytes(tensor: Tensor, dtype: str) -> int:
    return DTYPE_SIZES[tensor.dtype or dtype]


def _batch(settings: Training, mesh: PlanMesh) -> int:
    """Return the bytes of tokens, segments, positions, targets and weights of all microbatches."""
    shape = (settings.microbatch, settings.length)
    return 5 * 4 * settings.accumulation * mesh.activation(("batch", "sequence"), shape)


def _tokens(settings: Training, mesh: PlanMesh) -> int:
    """Return the tokens of a microbatch on one device."""
    return mesh.activation(("batch", "sequence"), (settings.microbatch, settings.length))


def _kept(settings: Training, shapes: ModelShapes, mesh: PlanMesh, tokens: int) -> int:
    """Return the bytes that the forward pass keeps for the backward pass."""
    values = LayerValues.of(shapes, mesh).kept(settings.remat, settings.targets)
    size = DTYPE_SIZES[settings.dtype]
    return int(shapes.layers * tokens * values * size)


def _loss(settings: Training, shapes: ModelShapes, mesh: PlanMesh, tokens: int) -> int:
    """Return the bytes of the loss: hidden states, head, its gradient, logits of a chunk."""
    size, d = DTYPE_SIZES[settings.dtype], shapes.hidden
    head = shapes.vocabulary // max(1, mesh.ways(mesh.axis.vocab_axis)) * d
    frozen = settings.lora is not None
    chunk = min(settings.chunk, tokens)
    logits = chunk * (shapes.vocabulary // max(1, mesh.ways(mesh.axis.vocab_axis)))
    return int(2 * tokens * d * size + head * (4 + size if not frozen else size) + 3 * 4 * logits)


def _layer(
    settings: Training,
    shapes: ModelShapes,
    mesh: PlanMesh,
    tokens: int,
    trained: list[Tensor],
) -> int:
    """Return the bytes of the backward pass of one layer."""
    size, values = DTYPE_SIZES[settings.dtype], LayerValues.of(shapes, mesh)
    inner = 2 * values.everything * tokens * size
    weights = _of_layer(shapes.tensors, mesh) * size
    gradients = _of_layer(trained, mesh) * 4
    return int(inner + weights + gradients)


def _of_layer(tensors: tuple[Tensor, ...] | list[Tensor], mesh: PlanMesh) -> int:
    """Return the gathered values of the largest layer."""
    in_layers = [t for t in tensors if ".layers." in t.name]
    most = max((t.layers for t in in_layers), default=0)
    return sum(mesh.gathered(t) for t in in_layers if t.layers == most or _is_sparse(t))


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.axes[:1] == ("expert",) and math.prod(tensor.shape) > 0
