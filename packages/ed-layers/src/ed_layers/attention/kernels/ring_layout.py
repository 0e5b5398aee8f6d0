"""The positions of each device of a ring, and their order.

Causal attention runs in zig-zag order, which balances the work of the devices. The sequence is cut
into 2n chunks, and device i of n has chunks i and 2n - 1 - i: an early chunk with few visible keys,
and a late chunk with many. Brandon et al. 2023, "Striped Attention", show the imbalance of
contiguous parts; zig-zag is the layout of Llama 3's context parallelism. Two permutations of
devices convert a tensor to the zig-zag order, and two convert it back: one for chunks with even
numbers and one for chunks with odd numbers. In each, every device sends and receives one chunk.

Legend: b batch, s query length, t key length, h heads, n devices of the ring, L positions of one
device, i block, x positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ed_layers.attention.kernel import Projected
from ed_layers.attention.kernels.online import Recipe, row_blocks
from ed_layers.attention.scoring import pad_axis
from ed_layers.devices import AxisNames, get_mesh_axes, sequence_axes, ways

T = TypeVar("T")
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes:
        recipe: settings of the online softmax.
        mesh: all devices.
        batch, sequence, heads: mesh axes over which each dimension is split.
        bias: how a bias is split.
        zigzag: whether the order is zig-zag.
        scan: loop over the steps instead of unrolling them.
        block_q, block_k: positions per block, at most.
        out_dtype: dtype of the output: that of the queries, unless sinks are applied afterwards.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    batch: AxisNames | None
    sequence: AxisNames
    heads: AxisNames | None
    bias: P
    zigzag: bool
    scan: bool
    block_q: int
    block_k: int
    out_dtype: jnp.dtype

    @classmethod
    def of(cls, call: Projected) -> Plan | None:
        """Create a plan from a call; None if the mesh does not split the sequence."""
        config, scoring, sequence = call.config, call.scoring, sequence_axes(call.config)
        if config is None or sequence is None:
            return None
        shape = (call.q.shape[0], ways(config.mesh, sequence), call.q.shape[2])
        batch, _, heads = get_mesh_axes(config, ("batch", "sequence", "heads"), shape)
        bias = P()
        if scoring.bias is not None:
            one_row, one_head = (size == 1 for size in scoring.bias.shape[:2])
            bias = P(None if one_row else batch, None if one_head else heads, sequence)
        has_no_sinks = scoring.sinks is None
        return cls(
            recipe=Recipe.of(scoring, causal=call.mask_info.causal),
            mesh=config.mesh,
            batch=batch,
            sequence=sequence,
            heads=heads,
            bias=bias,
            zigzag=call.mask_info.causal,
            scan=config.scan_ring_attention,
            block_q=call.settings.block_q or 128,
            block_k=call.settings.block_k or 128,
            out_dtype=call.q.dtype if has_no_sinks else jnp.dtype(scoring.softmax_dtype),
        )

    @property
    def n(self) -> int:
        """Devices of the ring."""
        return ways(self.mesh, self.sequence)

    @property
    def total_dtype(self) -> jnp.dtype:
        """Dtype in which the steps are added up."""
        return jnp.promote_types(self.recipe.softmax_dtype, jnp.float32)

    def pad_axes(self, x: jax.Array, *axes: int) -> jax.Array:
        """With lengths that divide by the ring along `axes`; zeros are padding (segment 0)."""
        for axis in axes:
            x = pad_axis(x, axis, -x.shape[axis] % self.n)
        return x

    def pass_on(self, tree: T) -> T:
        """Send a pytree to the next device, and receive the pytree of the previous device."""
        pairs = [(i, (i + 1) % self.n) for i in range(self.n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sequence, pairs), tree)

    def steps(self, step: Callable[[jax.Array, T], T], carry: T) -> T:
        """Go round once: `step(device whose keys are in hand, carry)`.

        In the unrolled loop, the compiler removes the last `pass_on`, because its result is unused.
        """
        device_index = jax.lax.axis_index(self.sequence)
        if self.scan:
            return jax.lax.fori_loop(
                0, self.n, lambda i, x: step((device_index - i) % self.n, x), carry
            )
        for i in range(self.n):
            carry = step((device_index - i) % self.n, carry)
        return carry

    def on_mesh(self, function: Callable[..., Any], ins: str, outs: str) -> Callable[..., Any]:
        """Run on each device's part; a letter per argument: `t` [b, s, h, ...], `m` ids [b, s],
        `b` the bias, `w` whole."""
        specs = {
            "t": P(self.batch, self.sequence, self.heads),
            "m": P(self.batch, self.sequence),
            "b": self.bias,
            "w": P(),
        }
        # Unchecked: the loops of `online` start from constants, and the check would have each cast
        # to varying. Nothing depends on it: forward and backward are both written out, so that jax
        # adds no further sum over devices.
        return jax.shard_map(
            partial(function, self),
            mesh=self.mesh,
            in_specs=tuple(specs[letter] for letter in ins),
            out_specs=tuple(specs[letter] for letter in outs),
            check_vma=False,
        )

    def rows_and_heads(self, b: int, h: int) -> tuple[jax.Array, jax.Array]:
        """Numbers of this device's rows and heads among those of the call."""
        rows, heads = (
            jnp.arange(size) + (0 if axes is None else jax.lax.axis_index(axes) * size)
            for size, axes in ((b, self.batch), (h, self.heads))
        )
        return rows, heads

    def sum_of_bias(self, x: jax.Array) -> jax.Array:
        """Add up the gradient of a bias over the devices that share it."""
        for bias_axes, axes in zip(
            (*self.bias, None, None), (self.batch, self.heads), strict=False
        ):
            if bias_axes is None and axes is not None:
                x = jax.lax.psum(x, axes)
        return x


@dataclass(frozen=True)
class Side:
    """The order of one side, queries or keys, on its device: [b, L] to whole blocks and back.

    A block never contains tokens of both chunks of a device. Their indices are far apart, so the
    bounds of such a block would exclude no other block.
    """

    plan: Plan
    length: int
    max_block: int

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
        """Positions of a block: chunks consist of equal blocks of at most `max_block` positions."""
        return -(-self.chunk // -(-self.chunk // self.max_block))

    def split_blocks(self, x: jax.Array) -> jax.Array:
        """[b, L, ...] to [i, b, x, ...]."""
        if self.plan.zigzag:
            x = jnp.pad(x, ((0, 0), (0, self.length % 2), *[(0, 0)] * (x.ndim - 2)))
            x = enter(x, self.plan.sequence, self.plan.n)
        chunks = jnp.split(x, self.parts, axis=1)
        return jnp.concatenate([row_blocks(chunk, self.block) for chunk in chunks])

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `split_blocks`."""
        chunks = jnp.split(blocks, self.parts)
        flat = [jnp.moveaxis(c, 0, 1).reshape(c.shape[1], -1, *c.shape[3:]) for c in chunks]
        x = jnp.concatenate([c[:, : self.chunk] for c in flat], axis=1)
        if self.plan.zigzag:
            x = leave(x, self.plan.sequence, self.plan.n)
        return x[:, : self.length]

    def places(self, device: int | jax.Array) -> jax.Array:
        """Positions in the whole sequence of a device's blocks, [i, x]; n * L for padding."""
        chunks = get_chunks(device, self.plan.n) if self.plan.zigzag else (device,)
        inside = jnp.arange(-(-self.chunk // self.block) * self.block)
        places = []
        for number in chunks:
            owner, part = number // self.parts, number % self.parts
            # The second chunk of an odd length is one shorter.
            size = jnp.where(part == 0, self.chunk, self.length - self.chunk)
            place = owner * self.length + part * self.chunk + inside
            places.append(jnp.where(inside < size, place, self.plan.n * self.length))
        return jnp.concatenate(places).reshape(-1, self.block)


def home(chunk: int, n: int) -> int:
    """The device that holds a chunk in zig-zag order."""
    return chunk if chunk < n else 2 * n - 1 - chunk


def get_chunks(device: int | jax.Array, n: int) -> tuple[int | jax.Array, int | jax.Array]:
    """The chunks that a device holds in zig-zag order, the early one first."""
    return device, 2 * n - 1 - device


def routes(n: int) -> tuple[Pairs, Pairs]:
    """(from, to) of the even chunks and of the odd ones; device i sends chunks 2i and 2i + 1."""
    return (
        [(i, home(2 * i, n)) for i in range(n)],
        [(i, home(2 * i + 1, n)) for i in range(n)],
    )


def enter(x: jax.Array, axes: AxisNames, n: int) -> jax.Array:
    """From contiguous to zig-zag order, inside `shard_map`.

    Args:
        x: this device's part, [b, L, ...], L even.
        axes: what splits the sequence.
        n: devices along `axes`.
    """
    first, second = jnp.split(x, 2, axis=1)
    even, odd = routes(n)
    a, b = jax.lax.ppermute(first, axes, even), jax.lax.ppermute(second, axes, odd)
    # Of chunks i and 2n - 1 - i the even one came by the first permutation.
    ordered = jax.lax.axis_index(axes) % 2 == 0
    return jnp.concatenate([jnp.where(ordered, a, b), jnp.where(ordered, b, a)], axis=1)


def leave(x: jax.Array, axes: AxisNames, n: int) -> jax.Array:
    """The inverse of `enter`."""
    early_chunk, late_chunk = jnp.split(x, 2, axis=1)
    ordered = jax.lax.axis_index(axes) % 2 == 0
    even, odd = ([(to, start) for start, to in pairs] for pairs in routes(n))
    first = jax.lax.ppermute(jnp.where(ordered, early_chunk, late_chunk), axes, even)
    second = jax.lax.ppermute(jnp.where(ordered, late_chunk, early_chunk), axes, odd)
    return jnp.concatenate([first, second], axis=1)
