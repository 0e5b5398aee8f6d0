"""The time of a step: FLOPs, bytes of the memory, collectives by mesh axis, and their roofline.

The model is the roofline of "How to Scale Your Model" (https://jax-ml.github.io/scaling-book):
compute, memory and communication overlap, so the slowest of them determines the time. It is a lower
bound; no measurement on accelerators checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ed_infra.sharding.axes import split_mesh_axes

from ed_elarge.plan.devices import Hardware
from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.quantized import compute_mean_size
from ed_elarge.plan.settings import Serving, Training
from ed_elarge.plan.tensors import DTYPE_SIZES, ModelShapes
from ed_elarge.plan.training import PlannedStep


@dataclass(frozen=True)
class Time:
    """The bound of a step on one device.

    Attributes:
        flops: floating-point operations of one device, with recomputation.
        model_flops: operations without recomputation, which MFU counts.
        memory_bytes: bytes between the memory and the processor.
        collectives: mesh axis -> bytes that one device sends.
        seconds: part -> seconds: "compute", "memory", and one part for each mesh axis.
        tokens: tokens of a step over all devices.
        peak: FLOP/s of one device.
    """

    flops: float
    model_flops: float
    memory_bytes: float
    collectives: Mapping[str, float]
    seconds: Mapping[str, float]
    tokens: int
    peak: float
    count: int = field(default=1)

    @property
    def step(self) -> float:
        """Seconds of a step: the slowest part."""
        return max(self.seconds.values())

    @property
    def bound(self) -> str:
        """The slowest part."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices."""
        return self.tokens / self.step

    @property
    def mfu(self) -> float:
        """Share of the peak that the operations of the model use, 0 to 1."""
        return self.model_flops / self.step / self.peak


def estimate_training(
    settings: Training,
    shapes: ModelShapes,
    mesh: PlanMesh,
    hardware: Hardware,
    memory: PlannedStep,
) -> Time:
    """Return the bound of an optimizer step; `memory`: the memory of the step."""
    device, count = hardware.device, mesh.count
    tokens = settings.rows * settings.form.sides * settings.length
    learned = (4 if settings.lora is not None else 6) + 2 * settings.forwards
    attention = sum(
        12 * shapes.heads * shapes.head_dim * _span(cache.window, settings.length)
        for cache in shapes.caches
    )
    model = tokens * (learned * shapes.active + attention)
    redone = 0.0
    if settings.remat not in ("", "everything_saveable"):
        products = 2 * (shapes.active - shapes.vocabulary * shapes.hidden)
        redone = tokens * (attention / 6 + (0 if "dots" in settings.remat else products))
    ways = _ways_of_work(settings, mesh)
    flops = (model + redone) / ways
    peak = device.bf16 if DTYPE_SIZES[settings.dtype] == 2 else device.bf16 / 2
    size = compute_mean_size(shapes.tensors, settings.param_dtype, settings.codes, mesh)
    shard = sum(mesh.shard(t) for t in shapes.tensors)
    moved = (
        2 * memory.arguments
        + 3 * size * shard * settings.accumulation
        + 2 * memory.parts["activations"] * settings.accumulation
        + 2 * memory.parts["gradients"] * settings.accumulation
    )
    traffic = _training_traffic(settings, shapes, mesh)
    seconds = {"compute": flops / peak, "memory": moved / device.bandwidth}
    seconds |= {
        axis: sent_bytes / rate(axis, mesh, hardware) for axis, sent_bytes in traffic.items()
    }
    return Time(flops, model / count, moved, traffic, seconds, tokens, device.bf16, count)


def estimate_decoding(
    settings: Serving,
    shapes: ModelShapes,
    mesh: PlanMesh,
    hardware: Hardware,
    *,
    seqs: int,
    context: int,
    token_bytes: int,
) -> Time:
    """Return the bound of a decode step of one replica.

    Args:
        settings, shapes, mesh, hardware: what is served, and where.
        seqs: sequences of a step.
        context: tokens of each sequence in the cache.
        token_bytes: bytes of one cached token on one device.
    """
    device, size = hardware.device, DTYPE_SIZES[settings.dtype]
    span = sum(
        4 * shapes.heads * shapes.head_dim * min(context, c.window or context)
        for c in shapes.caches
    )
    ways = mesh.ways(mesh.axis.tensor_parallel_axis) * mesh.ways(mesh.axis.expert_axis)
    flops = seqs * (2 * shapes.active + span) / ways
    gathered = sum(
        mesh.count_gathered_values(t) * t.layers for t in shapes.tensors if not t.is_table
    )
    used = min(1.0, _experts_read(shapes, seqs))
    stored = compute_mean_size(shapes.tensors, settings.param_dtype, settings.codes, mesh)
    moved = gathered * used * stored + seqs * context * token_bytes
    tp = mesh.axis.tensor_parallel_axis
    traffic = {}
    if (n := mesh.ways(tp)) > 1:
        traffic[tp] = 2 * shapes.layers * seqs * shapes.hidden * size * 2 * (n - 1) / n
    fsdp = mesh.axis.fully_sharded_data_parallel_axis
    if (n := mesh.ways(fsdp)) > 1:
        traffic[fsdp] = gathered * stored * (n - 1) / n
    seconds = {"compute": flops / device.bf16, "memory": moved / device.bandwidth}
    seconds |= {
        axis: sent_bytes / rate(axis, mesh, hardware) for axis, sent_bytes in traffic.items()
    }
    return Time(flops, flops, moved, traffic, seconds, seqs, device.bf16, mesh.count)


def _experts_read(shapes: ModelShapes, seqs: int) -> float:
    """Return the share of the weights that a step of `seqs` tokens reads."""
    experts = [t for t in shapes.tensors if t.axes[:1] == ("expert",)]
    if not experts:
        return 1.0
    count = experts[0].shape[0]
    per_token = int(shapes.config.get("num_experts_per_tok") or 1)
    share = 1 - (1 - per_token / count) ** seqs
    sparse = sum(t.size for t in experts)
    total = sum(t.size for t in shapes.tensors)
    return (total - sparse + share * sparse) / total


def _span(window: int | None, length: int) -> float:
    """Return the keys that a query reads in the mean, twice: causal attention reads half."""
    if window is None or window >= length:
        return length / 2
    return window * (1 - window / (2 * length))


def _ways_of_work(settings: Training, mesh: PlanMesh) -> int:
    """Return the number of devices that share the work of a token batch without repetition."""
    tokens = settings.sequences * settings.length
    device_tokens = mesh.activation(("batch", "sequence"), (settings.sequences, settings.length))
    ep = mesh.ways(mesh.axis.expert_axis)
    return tokens // device_tokens * mesh.ways(mesh.axis.tensor_parallel_axis) * max(1, ep)


def _training_traffic(settings: Training, shapes: ModelShapes, mesh: PlanMesh) -> dict[str, float]:
    """Return the bytes that a device sends along each mesh axis in an optimizer step."""
    axis, parts = mesh.axis, settings.accumulation
    size = DTYPE_SIZES[settings.dtype]
    stored = compute_mean_size(shapes.tensors, settings.param_dtype, settings.codes, mesh)
    tokens = mesh.activation(("batch", "sequence"), (settings.sequences, settings.length))
    traffic: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        n = mesh.ways(name)
        if n > 1:
            traffic[name] = traffic.get(name, 0.0) + value * (n - 1) / n

    fsdp, dp = axis.fully_sharded_data_parallel_axis, axis.data_parallel_axis
    tp, sp, ep = (
        axis.tensor_parallel_axis,
        axis.sequence_parallel_axis,
        axis.expert_parallel_axis,
    )
    trains = settings.lora is None
    passes = 3 if settings.remat else 2
    for tensor in shapes.tensors:
        over = {name for entry in mesh.parameter(tensor) for name in split_mesh_axes(entry)}
        gathered_values = mesh.count_gathered_values(tensor) * tensor.layers
        if fsdp in over and tensor.axes[:1] != ("expert",):
            gather = min(size, stored) * passes * gathered_values
            add(fsdp, parts * (gather + (4 * gathered_values if trains else 0)))
        elif trains:
            add(fsdp, parts * 2 * 4 * mesh.shard(tensor))
        if trains:
            add(dp, parts * 2 * 4 * mesh.shard(tensor))
            add(sp, parts * 2 * 4 * mesh.shard(tensor))
    # Two products of a layer end with a reduction, in the forward and in the backward pass.
    stream = tokens * shapes.hidden * size
    add(tp, parts * shapes.layers * (4 if not settings.remat else 6) * 2 * stream)
    add(sp, parts * 3 * 2 * sum(tokens * c.kv_heads * c.key_dim * size for c in shapes.caches))
    if any(t.axes[:1] == ("expert",) for t in shapes.tensors):
        per_token = int(shapes.config.get("num_experts_per_tok") or 1)
        for name in dict.fromkeys((ep, *mesh.expert_axes)):
            add(name, parts * shapes.layers * 4 * stream * min(per_token, mesh.ways(name)))
    return traffic


def rate(axis: str, mesh: PlanMesh, hardware: Hardware) -> float:
    """Return the bytes/s that one device sends along a mesh axis.

    On a torus an axis uses both directions of one dimension. Among GPUs, the last axes are inside a
    node; an axis beyond the node uses the network.
    """
    device = hardware.device
    if device.links == "torus":
        return 2 * device.link if mesh.count <= hardware.count else device.network
    names = list(mesh.sizes)
    inner = math.prod(mesh.sizes[name] for name in names[names.index(axis) :])
    return device.link if inner <= device.node else device.network
