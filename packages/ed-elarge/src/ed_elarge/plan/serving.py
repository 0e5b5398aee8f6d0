"""The memory of the engine: weights, pages, states and the workspace of the largest step. No jax.

The formulas follow `ed_esurge.engine.setup.Setup.pool_sizes`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from ed_esurge.config import STATES_PER_SEQUENCE, EngineConfig
from ed_esurge.core.page_pool import pages_of_sequence
from ed_infra.errors import ConfigError

from ed_elarge.config.adaptation import LoraSection
from ed_elarge.plan.devices import DeviceKind, MemoryParts
from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.quantized import count_dequantized_values, count_weight_bytes
from ed_elarge.plan.settings import Serving
from ed_elarge.plan.tensors import DTYPE_SIZES, CacheShape, ModelShapes, PlanTensor
from ed_elarge.plan.training import iterate_adapter_tensors

#: Tokens of a step, unless `max_num_batched_tokens` is set (`ed_esurge.engine.setup.TOKEN_BUDGET`).
_TOKEN_BUDGET = {"gpu": 2048, "tpu": 8192}


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one replica on one device, and the requests that fit.

    Attributes:
        memory: the parts.
        pages: number of pages of each pool.
        needed: number of pages of one sequence of `longest` tokens, by pool.
        page_bytes: bytes of a page on one device, by pool.
        longest: maximum length of a sequence.
        seqs: maximum number of sequences of a step.
        tokens: maximum number of tokens of a step.
        replicas: number of engines with separate weights and pages.
        cached_tokens: number of tokens that all pages of a replica hold; 0 without attention.
        state_bytes: bytes of the recurrent states of one sequence on one device.
        saved_states: number of saved recurrent states.
    """

    memory: MemoryParts
    pages: dict[str, int]
    needed: dict[str, int]
    page_bytes: dict[str, int]
    longest: int
    seqs: int
    tokens: int
    replicas: int
    cached_tokens: int
    state_bytes: int = 0
    saved_states: int = 0

    @property
    def concurrent(self) -> int:
        """Sequences of `longest` tokens that run at the same time, over all replicas."""
        counts = [self.pages[name] // self.needed[name] for name in self.pages]
        replica_seqs = min(counts, default=self.seqs)
        return self.replicas * min(replica_seqs, self.seqs)


def plan_engine(
    settings: Serving, shapes: ModelShapes, mesh: PlanMesh, device: DeviceKind
) -> EngineMemory:
    """Return the memory of an engine on a device.

    Raises:
        ConfigError: the model has layers without keys, values and states, such as an encoder.
    """
    if len(shapes.caches) != shapes.layers and not shapes.states:
        raise ConfigError(
            f"elarge plan knows engines of attention and recurrent layers, and {shapes.model_type} "
            "has other layers"
        )
    options = settings.options
    mesh, replicas = replica(settings, mesh)
    longest = min(
        options.max_model_len,
        int(shapes.config.get("max_position_embeddings") or options.max_model_len),
    )
    tokens = options.max_num_batched_tokens or _TOKEN_BUDGET[device.kind]
    seqs = options.max_num_seqs
    if options.batch_invariant:
        tokens = options.max_num_batched_tokens or seqs
    seqs = min(seqs, tokens)
    tokens = max(seqs, min(tokens, seqs * longest))
    chunk = min(options.long_prefill_token_threshold or tokens, tokens)
    groups = _groups(shapes.caches)
    needed = {
        name: pages_of_sequence(members[0].window, longest, chunk, options.page_size)
        for name, members in groups.items()
    }
    page_bytes = {
        name: sum(token_bytes(one, settings, mesh) for one in members) * options.page_size
        for name, members in groups.items()
    }
    weights = sum(
        count_weight_bytes(tensor, settings.param_dtype, settings.codes, mesh)
        for tensor in shapes.tensors
    )
    slots = count_slot_bytes(settings, shapes, mesh)
    v, d = shapes.vocabulary, shapes.hidden
    state = seqs * (8 * v + 4 + 4 * d)
    work = workspace(settings, shapes, mesh, tokens=tokens, rows=seqs)
    dequantized_values = count_dequantized_values(shapes.tensors, settings.codes, mesh)
    work += DTYPE_SIZES[settings.dtype] * dequantized_values
    most = {
        name: min(pages * seqs, (2**31 - 1) // options.page_size) for name, pages in needed.items()
    }
    sequence_bytes = sum(needed[name] * page_bytes[name] for name in needed)
    state_bytes = shapes.count_state_bytes(settings.dtype)
    # With drafts, each running sequence has two states.
    running = state_bytes * seqs * (1 + bool(options.speculative_config))
    saved = 0
    if options.num_pages is not None and needed:
        pages = {
            name: options.num_pages
            if members[0].window is None
            else min(options.num_pages, most[name])
            for name, members in groups.items()
        }
        if state_bytes:
            free = sum(pages[name] * page_bytes[name] for name in pages) // 2
            saved = count_saved_states(options, seqs, free, state_bytes)
    else:
        free = (
            int(device.usable * options.hbm_utilization) - weights - slots - state - work - running
        )
        if state_bytes:
            most_bytes = sum(most[name] * page_bytes[name] for name in needed)
            spare = min(max(free // 3, free - most_bytes), free - sequence_bytes)
            saved = count_saved_states(options, seqs, spare, state_bytes)
            free -= saved * state_bytes
        pages = {
            name: max(n, min(most[name], n * free // sequence_bytes)) for name, n in needed.items()
        }
    slot_parts = {"adapters": slots} if slots else {}
    state_parts = {"recurrent states": running + saved * state_bytes} if state_bytes else {}
    memory = MemoryParts(
        {
            "parameters": weights,
            **slot_parts,
            "KV pages": sum(pages[name] * page_bytes[name] for name in pages),
            **state_parts,
            "sampler state": state,
            "temporary buffers": work,
        },
        limit=int(device.usable * options.hbm_utilization)
        if options.num_pages is None or not needed
        else device.usable,
    )
    full = [name for name, members in groups.items() if members[0].window is None]
    cached = min([pages[name] for name in full or pages], default=0) * options.page_size
    return EngineMemory(
        *(memory, pages, needed, page_bytes, longest, seqs, tokens, replicas, cached * replicas),
        state_bytes=state_bytes,
        saved_states=saved,
    )


def count_slot_bytes(settings: Serving, shapes: ModelShapes, mesh: PlanMesh) -> int:
    """Return the bytes of the slots of adapters on one device (`ed_models.adapters.slots`).

    Linear layers have A, B and a factor for each output, as DoRA. Experts have A and B.
    """
    options = settings.options
    if not options.max_loras:
        return 0
    section = LoraSection(rank=options.max_lora_rank, targets=options.lora_targets, dora=True)
    return sum(
        options.max_loras * DTYPE_SIZES[settings.dtype] * mesh.shard(tensor)
        for tensor in iterate_adapter_tensors(
            section, [t for t in shapes.tensors if not t.is_table]
        )
        if tensor.axes[:1] != ("expert",) or not tensor.name.endswith("lora_magnitude")
    )


def count_saved_states(options: EngineConfig, seqs: int, free: int, state_bytes: int) -> int:
    """Return the number of saved recurrent states, as `ed_esurge.engine.setup.Setup.pool_sizes`.

    Args:
        options: options of the engine.
        seqs: maximum number of running sequences.
        free: bytes for the states, if their number is not an option.
        state_bytes: bytes of one state.
    """
    if not options.enable_prefix_caching:
        return 0
    if options.num_states is not None:
        return options.num_states
    return min(STATES_PER_SEQUENCE * seqs, max(free, 0) // state_bytes)


def replica(settings: Serving, mesh: PlanMesh) -> tuple[PlanMesh, int]:
    """Return the mesh of one replica, and the number of replicas."""
    axis = settings.options.data_parallelism_axis
    if axis is None or mesh.sizes.get(axis, 1) == 1:
        return mesh, 1
    return replace(mesh, sizes={**mesh.sizes, axis: 1}), mesh.sizes[axis]


def _groups(caches: tuple[CacheShape, ...]) -> dict[str, list[CacheShape]]:
    """Group the layers that share a pool: those with a window, and those without."""
    groups: dict[str, list[CacheShape]] = defaultdict(list)
    for cache in caches:
        groups["full" if cache.window is None else "window"].append(cache)
    return dict(groups)


def token_bytes(cache: CacheShape, settings: Serving, mesh: PlanMesh) -> int:
    """Return the bytes of keys and values of one token in one layer on one device."""
    width = max(cache.key_dim, cache.value_dim)
    ways = 1 if cache.value_dim == 0 else 2
    heads = mesh.shard(PlanTensor("kv", (cache.kv_heads,), ("kv_heads",)))
    size = DTYPE_SIZES.get(settings.kv_dtype, 1)
    scales = 0
    if size == 1:
        group = settings.kv_group
        scales = 4 * (1 if group is None or width % group else width // group)
    return heads * ways * (width * size + scales)


def workspace(
    settings: Serving, shapes: ModelShapes, mesh: PlanMesh, *, tokens: int, rows: int
) -> int:
    """Estimate the temporary buffers of the largest step; this part is not exact.

    The larger of: one layer (its widest activations and gathered weights), and sampling (four
    float32 arrays of the logits of all rows).
    """
    size = DTYPE_SIZES[settings.dtype]
    d, f = shapes.hidden, int(shapes.config.get("intermediate_size") or 4 * shapes.hidden)
    tp = mesh.ways(mesh.axis.tensor_parallel_axis)
    per_token = 3 * d + max(
        3 * f // tp, 3 * (shapes.heads + shapes.kv_heads) * shapes.head_dim // tp
    )
    layer = tokens * per_token * size
    gathered = sum(
        mesh.count_gathered_values(t) * size
        for t in shapes.tensors
        if t.layers > 1 and mesh.count_gathered_values(t) > math.prod(t.shape) // max(1, mesh.count)
    )
    logits = 4 * 4 * rows * shapes.vocabulary
    return max(layer + gathered, logits) + tokens * d * size
