"""`ring`: attention over a sequence that is split over devices (context parallelism).

Each device keeps its queries; keys and values go round the ring of devices (Liu, Zaharia & Abbeel
2023, "Ring Attention with Blockwise Transformers"), and each step is the online softmax of
`ed_layers.attention.online` over the part in hand. Causal attention runs in zig-zag order, in which
each device has the same work at each step. The backward pass goes round once more: gradients of
keys and values travel with them. No device ever holds more keys than its own and the part in hand.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim
of queries and keys, d head dim of values, n devices of the ring, L positions of one device, i query
block, j key block, x, y their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention import online
from ed_layers.attention.blockwise import blockwise_attention, share_beside
from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.online import Spec, Where, split
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.zigzag import Axes, enter, leave


def ring_attention(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """Softmax attention over the mesh axis that splits the sequence; `blockwise` where none does.

    Lengths that do not divide by the devices are padded, padding is masked. Batch and heads stay
    split as the config's partition rules say; key heads that do not divide are repeated.
    """
    plan = Plan.of(q, scoring, mask_info, mechanism)
    if plan is None:
        as_blockwise = (("blockwise", mechanism.settings_of("ring")),)
        mechanism = replace(mechanism, settings=as_blockwise)
        return blockwise_attention(q, k, v, mask_info, scoring, mechanism)
    s, groups = q.shape[1], k.shape[2]
    repeat = math.lcm(groups, plan.head_ways) // groups
    if repeat > 1:
        k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
    q, k, v, mask_info = (jax.tree.map(plan.padded, x) for x in (q, k, v, mask_info))
    limits = scoring.window, scoring.chunk
    out, lse = attention_on_ring(plan, q, k, v, mask_info, limits)
    if scoring.sinks is not None:
        out = out * share_beside(scoring.sinks, lse)[..., None]
    return out[:, :s].astype(q.dtype)


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes:
        spec: of the online softmax.
        mesh: all devices.
        batch, sequence, heads: mesh axes over which each dimension is split.
        n, head_ways: devices along `sequence` and along `heads`.
        zigzag: whether the order is zig-zag.
        scan: loop over the steps instead of unrolling them.
        block_q, block_k: positions per block, at most.
    """

    spec: Spec
    mesh: Mesh | AbstractMesh
    batch: Axes | None
    sequence: Axes
    heads: Axes | None
    n: int
    head_ways: int
    zigzag: bool
    scan: bool
    block_q: int
    block_k: int

    @classmethod
    def of(
        cls, q: jax.Array, scoring: Scoring, mask_info: MaskInfo, mechanism: Mechanism
    ) -> Plan | None:
        """Read off the config; None where the mesh does not split the sequence."""
        sequence = sequence_axes(mechanism.config)
        if sequence is None:
            return None
        config = mechanism.config
        mesh, b, h = config.mesh, q.shape[0], q.shape[2]
        n = ways(mesh, sequence)
        names, shape = ("batch", "sequence", "heads"), (b, n, h)
        placed = tuple(config.partition_manager.resolve(names, "train", shape, mesh))
        batch, _, heads = (*placed, None, None)[:3]
        settings = mechanism.settings_of("ring")
        return cls(
            spec=Spec.of(scoring, causal=mask_info.causal),
            mesh=mesh,
            batch=batch,
            sequence=sequence,
            heads=heads,
            n=n,
            head_ways=ways(mesh, heads),
            zigzag=mask_info.causal,
            scan=config.scan_ring_attention,
            block_q=settings.block_q or 128,
            block_k=settings.block_k or 128,
        )

    @property
    def total_dtype(self) -> Any:
        """Dtype in which the steps are added up."""
        return jnp.promote_types(self.spec.softmax_dtype, jnp.float32)

    def padded(self, x: jax.Array) -> jax.Array:
        """[b, s, ...] with a length that divides; zeros are padding (segment 0)."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.n), *[(0, 0)] * (x.ndim - 2)))

    def pass_on(self, tree: Any) -> Any:
        """Give what is in hand to the next device."""
        pairs = [(i, (i + 1) % self.n) for i in range(self.n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sequence, pairs), tree)

    def steps(self, step: Callable[[Any], Any], carry: Any) -> Any:
        """Go round once. Unrolled, the compiler drops what the last step passes on for nothing."""
        if self.scan:
            return jax.lax.fori_loop(0, self.n, lambda _, carry: step(carry), carry)
        for _ in range(self.n):
            carry = step(carry)
        return carry

    def on_mesh(self, function: Callable[..., Any], ins: str, outs: str) -> Callable[..., Any]:
        """Run on each device's part; a letter per argument: `t` [b, s, h, ...], `i` [b, s, ...]
        (ids), `w` whole."""
        specs = {
            "t": P(self.batch, self.sequence, self.heads),
            "i": P(self.batch, self.sequence),
            "w": P(),
        }
        # Unchecked: the loops of `online` start from constants, which the check would want to be
        # cast to varying one by one, and nothing here is summed over devices behind our back:
        # forward and backward are both written out.
        return jax.shard_map(
            partial(function, self),
            mesh=self.mesh,
            in_specs=tuple(specs[letter] for letter in ins),
            out_specs=tuple(specs[letter] for letter in outs),
            check_vma=False,
        )


def sequence_axes(config: Any) -> Axes | None:
    """The mesh axes that split the sequence of a model's activations, None where it is whole.

    Args:
        config: with `mesh` and `partition_manager`; what has neither runs on one device.
    """
    mesh = getattr(config, "mesh", None)
    if mesh is None:
        return None
    spec = config.partition_manager.resolve(("batch", "sequence"), "train", None, mesh)
    return spec[1] if len(spec) > 1 else None


def ways(mesh: Mesh | AbstractMesh, axes: Axes | None) -> int:
    """In how many parts the axes split a dimension."""
    return math.prod(
        mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes or ())
    )


@dataclass(frozen=True)
class Side:
    """The order of one side, queries or keys, on its device: [b, L] to whole blocks and back.

    A block never reaches over the two chunks of a device, whose indices are far apart: its bounds
    would tell nothing.
    """

    plan: Plan
    length: int
    wanted: int

    @property
    def parts(self) -> int:
        """Chunks per device."""
        return 2 if self.plan.zigzag else 1

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        return -(-self.length // self.parts)

    @property
    def block(self) -> int:
        """Positions of a block: chunks are cut into equal blocks of at most what was wanted."""
        return -(-self.chunk // -(-self.chunk // self.wanted))

    def cut(self, x: jax.Array) -> jax.Array:
        """[b, L, ...] to [i, b, x, ...]."""
        if self.plan.zigzag:
            x = jnp.pad(x, ((0, 0), (0, self.length % 2), *[(0, 0)] * (x.ndim - 2)))
            x = enter(x, self.plan.sequence, self.plan.n)
        chunks = jnp.split(x, self.parts, axis=1)
        return jnp.concatenate([split(chunk, self.block) for chunk in chunks])

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        chunks = jnp.split(blocks, self.parts)
        flat = [jnp.moveaxis(c, 0, 1).reshape(c.shape[1], -1, *c.shape[3:]) for c in chunks]
        x = jnp.concatenate([c[:, : self.chunk] for c in flat], axis=1)
        if self.plan.zigzag:
            x = leave(x, self.plan.sequence, self.plan.n)
        return x[:, : self.length]


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, mask_info: MaskInfo, limits: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention of a split sequence, on all devices.

    Args:
        q: [b, s, h, k].
        k, v: [b, t, g, k] and [b, t, g, d].
        limits: window and chunk; scalars in which 0 = no limit, or None.

    Returns:
        [b, s, h, d] in the dtype of the sums, zeros for a query that sees nothing, and the
        log-sum-exp of its scores [b, s, h], then -inf.
    """
    return plan.on_mesh(forward_here, "tttiw", "tt")(q, k, v, mask_info, limits)


def forward_here(plan: Plan, q, k, v, mask_info: MaskInfo, limits: Any):
    """The way round, on one device."""
    queries, keys, where = prepared(plan, q, k, mask_info, limits)
    q_blocks = query_blocks(queries, q, k.shape[2])
    hand = (key_blocks(keys, k), key_blocks(keys, v), where.k_segments, where.k_index)

    def step(carry):
        hand, out, lse = carry
        k_j, v_j, *ids = hand
        found = online.forward(plan.spec, q_blocks, k_j, v_j, None, now(where, *ids))
        return plan.pass_on(hand), *merged(out, lse, *found)

    rows = q_blocks.shape[:-1]
    out = jnp.zeros((*rows, v.shape[-1]), plan.total_dtype)
    lse = jnp.full((*rows, 1), -jnp.inf, plan.total_dtype)
    _, out, lse = plan.steps(step, (hand, out, lse))
    return tokens(queries, out), tokens(queries, lse)[..., 0]


def forward_and_save(plan: Plan, q, k, v, mask_info: MaskInfo, limits: Any):
    out, lse = forward(plan, q, k, v, mask_info, limits)
    # Kept in the dtype of q, as the layer after keeps it too; without sinks it is one array.
    return (out, lse), (q, k, v, mask_info, limits, out.astype(q.dtype), lse)


def backward_of_call(plan: Plan, saved, cotangents):
    grads = plan.on_mesh(backward_here, "tttiwtttt", "ttt")(*saved, *cotangents)
    return *(g.astype(x.dtype) for g, x in zip(grads, saved[:3], strict=True)), None, None


attention_on_ring = jax.custom_vjp(forward, nondiff_argnums=(0,))
attention_on_ring.defvjp(forward_and_save, backward_of_call)


def backward_here(plan: Plan, q, k, v, mask_info, limits, out, lse, d_out, d_lse):
    """The second way round, on one device: gradients of q, k and v."""
    queries, keys, where = prepared(plan, q, k, mask_info, limits)
    groups = k.shape[2]
    # What all weights of a query have in common: the sum that softmax takes out, and d_lse.
    shared = jnp.sum(d_out * out, axis=-1) - d_lse
    q_blocks, d_out = (query_blocks(queries, x, groups) for x in (q, d_out))
    lse, shared = (query_blocks(queries, x[..., None], groups) for x in (lse, shared))
    hand = (key_blocks(keys, k), key_blocks(keys, v), where.k_segments, where.k_index)
    zeros = [jnp.zeros(x.shape, plan.total_dtype) for x in (q_blocks, *hand[:2])]

    def step(carry):
        hand, d_q, *d_kv = carry
        k_j, v_j, *ids = hand
        d_q_j, *d_kv_j, _ = online.backward(
            plan.spec, q_blocks, k_j, v_j, None, now(where, *ids), lse, shared, d_out
        )
        d_kv = [total + part for total, part in zip(d_kv, d_kv_j, strict=True)]
        return plan.pass_on(hand), d_q + d_q_j, *plan.pass_on(d_kv)

    # After n steps what was passed on is at home again.
    _, d_q, d_k, d_v = plan.steps(step, (hand, *zeros))
    return tokens(queries, d_q), *(keys.join(x.transpose(0, 1, 3, 2, 4)) for x in (d_k, d_v))


def prepared(plan: Plan, q, k, mask_info: MaskInfo, limits: Any) -> tuple[Side, Side, Where]:
    """Both sides, and who may attend to whom while each device has its own keys in hand."""
    queries = Side(plan, q.shape[1], plan.block_q)
    keys = Side(plan, k.shape[1], plan.block_k)
    q_ids = queries.cut(jnp.stack([mask_info.q_segment_ids, mask_info.q_index], axis=2))
    k_ids = keys.cut(jnp.stack([mask_info.kv_segment_ids, mask_info.kv_index], axis=2))
    return queries, keys, Where(q_ids[..., 0], q_ids[..., 1], k_ids[..., 0], k_ids[..., 1], *limits)


def now(where: Where, k_segments: jax.Array, k_index: jax.Array) -> Where:
    """The mask against the keys in hand."""
    return replace(where, k_segments=k_segments, k_index=k_index)


def query_blocks(queries: Side, x: jax.Array, groups: int) -> jax.Array:
    """[b, L, h, k] to [i, b, g, r, x, k]."""
    x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
    return queries.cut(x).transpose(0, 1, 3, 4, 2, 5)


def key_blocks(keys: Side, x: jax.Array) -> jax.Array:
    """[b, L, g, k] to [j, b, g, y, k]."""
    return keys.cut(x).transpose(0, 1, 3, 2, 4)


def tokens(queries: Side, blocks: jax.Array) -> jax.Array:
    """[i, b, g, r, x, d] to [b, L, h, d]."""
    x = queries.join(blocks.transpose(0, 1, 4, 2, 3, 5))
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def merged(out, lse, out_j, lse_j) -> tuple[jax.Array, jax.Array]:
    """Attention to the keys of both, from that to each: outputs, and log-sum-exps [..., 1]."""
    top = jnp.maximum(lse, lse_j)
    anchor = jnp.where(jnp.isfinite(top), top, 0)
    share, share_j = jnp.exp(lse - anchor), jnp.exp(lse_j - anchor)
    total = share + share_j
    out = (out * share + out_j * share_j) / jnp.where(total == 0, 1, total)
    return out, top + jnp.log(total)
