"""`ring`: attention over a sequence that is split over devices (context parallelism).

Each device keeps its queries. Keys and values travel around the ring of devices (Liu, Zaharia &
Abbeel 2023, "Ring Attention with Blockwise Transformers"). Each step adds the visiting keys to the
online softmax of `ed_layers.attention.kernels.online`. Causal attention runs in zig-zag order, in
which each device has the same work at each step. The backward pass is a second round, in which the
gradients of keys and values travel with them. No device holds more keys than its own and the
visiting ones.

Legend: b batch, s query length, t key length, h heads, g kv heads, r heads per kv head, k head dim
of queries and keys, d head dim of values, n devices of the ring, L positions of one device, i query
block, j key block, x, y their sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ed_layers.attention.kernel import Kernel, Projected
from ed_layers.attention.kernels import online
from ed_layers.attention.kernels.blockwise import blockwise_attention
from ed_layers.attention.kernels.online import BlockMask
from ed_layers.attention.kernels.ring_layout import Plan, Side
from ed_layers.attention.kernels.softmax import PartialAttention, share_beside
from ed_layers.attention.scoring import WindowLimit, split_heads
from ed_layers.devices import repeated_for, ways

#: Window and chunk, and the key of dropout.
RingLimits = tuple[WindowLimit | None, WindowLimit | None, jax.Array | None]


def ring_attention(call: Projected) -> Float[Array, "b s h d"]:
    """Compute attention over the mesh axis of the sequence; `blockwise` without such an axis.

    Lengths are padded to a multiple of the devices, and padding is masked. Batch and heads keep the
    sharding of the partition rules; key heads are repeated if the devices do not divide them.
    Scores exist for one block at a time. A bias is split along the queries, not along the keys.
    """
    plan = Plan.of(call)
    if plan is None:
        return blockwise_attention(call)
    scoring, s = call.scoring, call.q.shape[1]
    k, v = repeated_for(ways(plan.mesh, plan.heads), call.k, call.v)
    bias = None if scoring.bias is None else plan.pad_axes(scoring.bias, 2, 3)
    q, k, v = (plan.pad_axes(x, 1) for x in (call.q, k, v))
    mask_info = jax.tree.map(lambda x: plan.pad_axes(x, 1), call.mask_info)
    limits = scoring.window, scoring.chunk, scoring.dropout_key if scoring.dropout > 0 else None
    out, lse = attention_on_ring(plan, q, k, v, bias, mask_info, limits)
    if scoring.sinks is not None:
        out = out * share_beside(scoring.sinks, lse)[..., None]
    return out[:, :s].astype(q.dtype)


def _forward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask_info: MaskInfo,
    limits: RingLimits,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention of a split sequence on all devices.

    Args:
        q: [b, s, h, k].
        k, v: [b, t, g, k] and [b, t, g, d].
        bias: [b or 1, h or 1, s, t].

    Returns:
        The output [b, s, h, d] in `plan.out_dtype`, and the log-sum-exp of the scores [b, s, h].
        For a query without visible keys, these are 0 and -inf.
    """
    run = plan.on_mesh(forward_here, "tttbmw", "tt")
    return run(q, k, v, bias, mask_info, limits)


def forward_here(plan: Plan, q, k, v, bias, mask_info: MaskInfo, limits: RingLimits):
    """Run one round of the ring on one device."""
    shard = Here(plan, q, k, bias, mask_info, limits)
    q_blocks, hand = shard.query_blocks(q), shard.hand(k, v)

    def step(device, carry):
        hand, part = carry
        k_j, v_j, *_ = hand
        bias_j, mask = shard.get_bias(device), shard.mask(device, hand)
        part_j = online.forward(plan.recipe, q_blocks, k_j, v_j, bias_j, mask, lambda part: part)
        return plan.pass_on(hand), part.merge(part_j)

    start = PartialAttention.empty(q_blocks.shape[:-1], v.shape[-1], plan.total_dtype)
    _, part = plan.steps(step, (hand, start))
    return shard.tokens(part.out.astype(plan.out_dtype)), shard.tokens(part.lse)[..., 0]


def _forward_and_save(plan: Plan, q, k, v, bias, mask_info: MaskInfo, limits: RingLimits):
    # Named here, so a remat policy that keeps these arrays does not run the ring again.
    results = checkpoint_name(_forward(plan, q, k, v, bias, mask_info, limits), "attn_output")
    return results, (q, k, v, bias, mask_info, limits, *results)


def _backward_of_call(plan: Plan, saved, cotangents):
    inputs = saved[:4]
    grads = plan.on_mesh(backward_here, "tttbmwtttt", "tttb")(*saved, *cotangents)
    grads = [None if x is None else d.astype(x.dtype) for d, x in zip(grads, inputs, strict=True)]
    return *grads, None, None


attention_on_ring = jax.custom_vjp(_forward, nondiff_argnums=(0,))
attention_on_ring.defvjp(_forward_and_save, _backward_of_call)


def backward_here(plan: Plan, q, k, v, bias, mask_info, limits, out, lse, d_out, d_lse):
    """Run the second round on one device, and return the gradients of q, k, v and bias."""
    shard = Here(plan, q, k, bias, mask_info, limits)
    out, d_out = out.astype(plan.total_dtype), d_out.astype(plan.total_dtype)
    # The term that all weights of a query share: the mean of the softmax, and d_lse.
    shared = jnp.sum(d_out * out, axis=-1) - d_lse
    query_terms = (d_out, lse[..., None], shared[..., None])
    d_out, lse, shared = (
        shard.query_blocks(x.astype(plan.recipe.softmax_dtype)) for x in query_terms
    )
    q_blocks = shard.query_blocks(q)
    hand = shard.hand(k, v)
    zeros = [jnp.zeros(x.shape, plan.total_dtype) for x in (q_blocks, *hand[:2])]
    d_bias = None if shard.bias is None else jnp.zeros(shard.bias.shape, plan.total_dtype)

    def step(device, carry):
        hand, d_q, d_k, d_v, d_bias = carry
        k_j, v_j, *_ = hand
        bias_j, mask = shard.get_bias(device), shard.mask(device, hand)
        d_q_j, d_k_j, d_v_j, d_bias_j, _ = online.backward(
            plan.recipe, q_blocks, k_j, v_j, bias_j, mask, lse, shared, d_out
        )
        if d_bias is not None:
            d_bias = d_bias.at[..., shard.columns(device)].add(d_bias_j, mode="drop")
        d_k, d_v = plan.pass_on((d_k + d_k_j, d_v + d_v_j))
        return plan.pass_on(hand), d_q + d_q_j, d_k, d_v, d_bias

    # After n steps, each device has its own keys again, with their gradients.
    _, d_q, d_k, d_v, d_bias = plan.steps(step, (hand, *zeros, d_bias))
    d_k, d_v = (shard.keys.join(x.transpose(0, 1, 3, 2, 4)) for x in (d_k, d_v))
    return shard.tokens(d_q), d_k, d_v, None if d_bias is None else shard.whole_bias(d_bias, bias)


class Here:
    """The part of a call on one device: its queries, and mask and bias of the visiting keys.

    The object exists inside `shard_map`; all lengths are local.
    """

    def __init__(self, plan: Plan, q, k, bias, mask_info: MaskInfo, limits: RingLimits):
        self.plan = plan
        self.queries = Side(plan, q.shape[1], plan.block_q)
        self.keys = Side(plan, k.shape[1], plan.block_k)
        self.groups, self.repeat = k.shape[2], q.shape[2] // k.shape[2]
        self.rows_and_heads = plan.rows_and_heads(q.shape[0], q.shape[2])
        self.mask_info, self.limits = mask_info, limits
        ids = jnp.stack([mask_info.q_segment_ids, mask_info.q_index], axis=2)
        self.q_ids = self.queries.split_blocks(ids)
        self.bias = None if bias is None else self.bias_rows(bias)

    def hand(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the traveling arrays: [j, b, g, y, k], [j, b, g, y, d], and ids [j, b, y, 2]."""
        ids = jnp.stack([self.mask_info.kv_segment_ids, self.mask_info.kv_index], axis=2)
        k, v = (self.keys.split_blocks(x).transpose(0, 1, 3, 2, 4) for x in (k, v))
        return k, v, self.keys.split_blocks(ids)

    def mask(self, device: jax.Array, hand: tuple[jax.Array, ...]) -> BlockMask:
        """Return the mask for the visiting keys of a device."""
        ids, (window, chunk, key), places = hand[2], self.limits, None
        if key is not None or self.plan.recipe.alibi is not None:
            query_places = self.queries.places(jax.lax.axis_index(self.plan.sequence))
            places = (*self.rows_and_heads, query_places, self.keys.places(device))
        q_ids = self.q_ids
        return BlockMask(
            *(q_ids[..., 0], q_ids[..., 1], ids[..., 0], ids[..., 1]),
            *(window, chunk, key, places),
        )

    def query_blocks(self, x: jax.Array) -> jax.Array:
        """[b, L, h, k] to [i, b, g, r, x, k]."""
        x = x.reshape(*x.shape[:2], self.groups, self.repeat, x.shape[-1])
        return self.queries.split_blocks(x).transpose(0, 1, 3, 4, 2, 5)

    def tokens(self, blocks: jax.Array) -> jax.Array:
        """[i, b, g, r, x, d] to [b, L, h, d]."""
        x = self.queries.join(blocks.transpose(0, 1, 4, 2, 3, 5))
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def bias_rows(self, bias: jax.Array) -> jax.Array:
        """[b or 1, h or 1, L, t] to [b or 1, g or 1, r or 1, i * x, t]."""
        blocks = self.queries.split_blocks(bias.swapaxes(1, 2)).swapaxes(0, 1)
        rows = blocks.reshape(len(bias), -1, *bias.shape[1::2]).swapaxes(1, 2)
        return split_heads(rows, self.groups, self.repeat)

    def whole_bias(self, d_bias: jax.Array, bias: jax.Array) -> jax.Array:
        """Invert `bias_rows` for a gradient, and sum over the devices that share the bias."""
        rows = d_bias.reshape(*bias.shape[:2], -1, bias.shape[3]).swapaxes(1, 2)
        blocks = rows.reshape(len(bias), -1, self.queries.block, *rows.shape[2:])
        return self.plan.sum_of_bias(self.queries.join(blocks.swapaxes(0, 1)).swapaxes(1, 2))

    def columns(self, device: jax.Array) -> jax.Array:
        """Return the bias columns of a device's keys, [j * y]; columns past the end are padding."""
        return self.keys.places(device).ravel()

    def get_bias(self, device: jax.Array) -> jax.Array | None:
        """Return the bias of the visiting keys, [b or 1, g or 1, r or 1, i * x, j * y]."""
        if self.bias is None:
            return None
        return jnp.take(self.bias, self.columns(device), axis=-1, mode="fill", fill_value=0)


KERNELS = (Kernel("ring", "projected", "plain XLA, around the ring", ring_attention),)
