"""The memory of a train step on one device. No jax.

Arguments (parameters, optimizer state, batch) follow exactly from shapes and shardings. Temporary
buffers are an estimate of the largest of three moments: the loss, the backward pass of a layer, and
the sum of the gradients of devices with different tokens.
`docs/plan.md` states the measured errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ed_elarge.config.adaptation import LoraSection
from ed_elarge.plan.activations import LayerValues
from ed_elarge.plan.buffers import ACCELERATOR, Buffers
from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.optimizer import Moments
from ed_elarge.plan.quantized import count_dequantized_values, count_weight_bytes
from ed_elarge.plan.settings import DEFAULT_TARGETS, ROW_ARRAYS, Training
from ed_elarge.plan.tensors import DTYPE_SIZES, ModelShapes, PlanTensor

#: Parts that are arguments of the step and exist between steps.
_ARGUMENTS = (
    *("parameters", "adapters", "reference", "masters", "moments", "ema", "batch"),
    *("KV pages", "recurrent states", "sampler state"),
)
#: The part of each moment in which the temporary buffers can be largest.
_MOMENTS = {
    "loss": "logits and head",
    "layer": "layer buffers",
    "reduction": "sums of gradients",
}


@dataclass(frozen=True)
class PlannedStep:
    """The parts of a train step, in bytes on one device.

    Attributes:
        parts: part -> bytes. The parts after `_ARGUMENTS` are temporary buffers.
        moment: when the temporary buffers are largest: "loss", "layer" or "reduction".
    """

    parts: dict[str, int]
    moment: str

    @property
    def arguments(self) -> int:
        """Bytes of the arguments."""
        return sum(self.parts[name] for name in _ARGUMENTS)

    @property
    def temporary(self) -> int:
        """Bytes of the temporary buffers."""
        return sum(self.parts.values()) - self.arguments


def step(
    settings: Training, shapes: ModelShapes, mesh: PlanMesh, buffers: Buffers = ACCELERATOR
) -> PlannedStep:
    """Return the memory of a train step.

    Args:
        settings, shapes, mesh: the step.
        buffers: temporary values of the backend that compiles the step.
    """
    base = list(shapes.tensors)
    added = [*iterate_adapter_tensors(settings.lora, base)] if settings.lora is not None else []
    trained = added or base
    moments = Moments(settings.arguments, settings.param_dtype, mesh)
    adapter_moments = Moments(settings.arguments, "float32", mesh)
    parts: dict[str, int] = dict.fromkeys(_ARGUMENTS, 0)
    codes = settings.codes
    parts["parameters"] = sum(
        count_weight_bytes(t, settings.param_dtype, codes, mesh) for t in base
    )
    parts["reference"] = parts["parameters"] if settings.has_copy and settings.refers else 0
    parts["adapters"] = sum(4 * mesh.shard(t) for t in added)
    if settings.lora is not None and settings.lora.subtracts_start:
        layers = {t.name.removesuffix(".kernel") for t in base}
        initial_matrices = [
            t
            for t in added
            if t.name.endswith(("lora_a", "lora_b")) and t.name.rpartition(".")[0] in layers
        ]
        parts["adapters"] += sum(4 * mesh.shard(t) for t in initial_matrices)
    for tensor in trained:
        for name, size in (adapter_moments if added else moments).of(tensor).items():
            parts[name] += size
    parts["batch"] = _batch(settings, mesh)
    tokens = mesh.activation(("batch", "sequence"), (settings.sequences, settings.length))
    in_layers = sum(
        _bytes(t, settings.param_dtype) * mesh.shard(t) for t in trained if ".layers." in t.name
    )
    gradient_bytes = sum(4 * mesh.shard(t) for t in trained)
    values, size = LayerValues.of(shapes, mesh), DTYPE_SIZES[settings.dtype]
    saved_values = values.count_saved_values(settings.remat, settings.targets)
    parts["gradients"] = in_layers + (gradient_bytes if settings.accumulation > 1 else 0)
    parts["activations"] = int(shapes.layers * tokens * saved_values * size)
    table = _table(shapes, mesh)
    chunk = min(settings.chunk, tokens)
    logits = 4 * chunk * (table // shapes.hidden)
    stream = tokens * shapes.hidden * size
    loss = buffers.compute_loss_bytes(
        logits=logits,
        table=table,
        size=size,
        stored=DTYPE_SIZES[settings.param_dtype],
        stream=stream,
        trained=settings.lora is None,
        is_chunked=tokens > chunk,
        referred=settings.refers,
        gathered=_gathers_head(shapes, mesh),
        split=table < shapes.vocabulary * shapes.hidden,
    )
    inner = (
        buffers.compute_layer_values(values, settings.remat, adapted=bool(added)) * tokens * size
    )
    # The gradients of one microbatch exist together with the sums of all.
    sums = 8 if settings.accumulation > 1 else 0
    copies = (buffers.tables * DTYPE_SIZES[settings.param_dtype] + sums) * table
    copies *= settings.lora is None
    weights = 4 * _largest_layer(shapes.tensors, mesh)
    scattered = buffers.scattered * (settings.lora is None)
    layer = max(inner + buffers.weights * weights, scattered * weights + 4 * stream) + copies
    layer += size * count_dequantized_values(shapes.tensors, codes, mesh)
    layer += buffers.experts * size * _experts(shapes.tensors, mesh)
    # The activations no longer exist when the gradients of the tables are added.
    outside = sum(4 * mesh.shard(t) for t in trained if ".layers." not in t.name)
    axes = (mesh.axis.data_parallel_axis, mesh.axis.sequence_parallel_axis)
    replicated = any(mesh.ways(axis) > 1 for axis in axes)
    # The gradients of the table of the embedding and of the head, which may be one parameter.
    tables = 2 * DTYPE_SIZES[settings.param_dtype] * table * _gathers_head(shapes, mesh)
    reduction = max(buffers.reduced * outside * replicated, scattered * tables)
    reduction -= parts["activations"]
    bytes_at = {"loss": loss, "layer": layer, "reduction": reduction}
    moment = max(bytes_at, key=bytes_at.__getitem__)
    for name, key in _MOMENTS.items():
        parts[key] = int(bytes_at[name]) if name == moment else 0
    return PlannedStep(parts, moment)


def _bytes(tensor: PlanTensor, dtype: str) -> int:
    return DTYPE_SIZES[tensor.dtype or dtype]


def _batch(settings: Training, mesh: PlanMesh) -> int:
    """Return the bytes of the arrays of all microbatches; every value has four bytes."""
    shape = (settings.sequences, settings.length)
    tokens = len(settings.token_arrays) * mesh.activation(("batch", "sequence"), shape)
    rows = len(ROW_ARRAYS) * mesh.activation(("batch",), shape[:1]) * settings.form.samples
    return 4 * settings.accumulation * (tokens + rows)


def _table(shapes: ModelShapes, mesh: PlanMesh) -> int:
    """Return the values of the head on one device, gathered along the hidden size."""
    head = PlanTensor("head", (shapes.vocabulary, shapes.hidden), ("vocab", None))
    return mesh.shard(head)


def _gathers_head(shapes: ModelShapes, mesh: PlanMesh) -> bool:
    """Return whether the head is split along the hidden size."""
    ends = ("lm_head.kernel", "embed_tokens.embedding")
    tables = [tensor for tensor in shapes.tensors if tensor.name.endswith(ends)]
    return bool(tables) and mesh.count_gathered_values(tables[-1]) > mesh.shard(tables[-1])


def _largest_layer(tensors: tuple[PlanTensor, ...], mesh: PlanMesh) -> int:
    """Return the values that one layer with every kind of part gathers from other devices."""
    return sum(
        mesh.count_gathered_values(t)
        for t in tensors
        if ".layers." in t.name and mesh.count_gathered_values(t) * t.layers > mesh.shard(t)
    )


def _experts(tensors: tuple[PlanTensor, ...], mesh: PlanMesh) -> int:
    """Return the values of one layer's experts on a device."""
    return sum(mesh.shard(t) // t.layers for t in tensors if t.axes[:1] == ("expert",))


def iterate_adapter_tensors(
    section: LoraSection, tensors: Sequence[PlanTensor]
) -> Iterator[PlanTensor]:
    """Yield the matrices A and B of every adapted layer, and the lengths of DoRA."""
    patterns = [re.compile(pattern) for pattern in section.targets or (DEFAULT_TARGETS,)]
    for tensor in tensors:
        layer, _, last = tensor.name.rpartition(".")
        if last not in ("kernel", "embedding") or layer.endswith(".gate") or len(tensor.shape) < 2:
            continue
        if section.targets is None and (last != "kernel" or len(tensor.shape) > 2):
            continue  # without targets: linear layers alone
        if any(_matches(pattern, layer, tensor.layers) for pattern in patterns):
            yield from _adapter(section, tensor, layer)


def _matches(pattern: re.Pattern[str], layer: str, count: int) -> bool:
    """Return whether a pattern matches the name of a layer, with the number of its first layer."""
    name = layer.replace("*", "0")
    return bool(pattern.search(name) or pattern.search(name.replace(".", "/"))) and count > 0


def _adapter(section: LoraSection, tensor: PlanTensor, layer: str) -> Iterator[PlanTensor]:
    *lead, inputs, outputs = tensor.shape
    *lead_axes, input_axis, output_axis = tensor.axes
    shared = {"layers": tensor.layers, "dtype": "float32", "adapter": True}
    rank = section.rank
    yield PlanTensor(
        f"{layer}.lora_a", (*lead, inputs, rank), (*lead_axes, input_axis, None), **shared
    )
    yield PlanTensor(
        f"{layer}.lora_b", (*lead, rank, outputs), (*lead_axes, None, output_axis), **shared
    )
    if section.dora:
        name = f"{layer}.lora_magnitude"
        yield PlanTensor(name, (*lead, outputs), (*lead_axes, output_axis), **shared)
