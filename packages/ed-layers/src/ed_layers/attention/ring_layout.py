"""Which device of a ring holds which positions, and in what order.

Legend: b batch, s query length, t key length, h heads, n devices of the ring, L positions of one
device, i block, x positions of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ed_layers.attention.mechanism import Mechanism
from ed_layers.attention.online import Spec, split
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.zigzag import Axes, chunks_of, enter, leave


@dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes:
        spec: of the online softmax.
        mesh: all devices.
        batch, sequence, heads: mesh axes over which each dimension is split.
        bias: how a bias is split.
        zigzag: whether the order is zig-zag.
        scan: loop over the steps instead of unrolling them.
        block_q, block_k: positions per block, at most.
        out_dtype: of what leaves the ring: that of the queries, unless sinks are still to join.
    """

    spec: Spec
    mesh: Mesh | AbstractMesh
    batch: Axes | None
    sequence: Axes
    heads: Axes | None
    bias: P
    zigzag: bool
    scan: bool
    block_q: int
    block_k: int
    out_dtype: Any

    @classmethod
    def of(
        cls, q: jax.Array, scoring: Scoring, mask_info: MaskInfo, mechanism: Mechanism
    ) -> Plan | None:
        """Read off the config; None where the mesh does not split the sequence."""
        sequence = sequence_axes(mechanism.config)
        if sequence is None:
            return None
        config = mechanism.config
        mesh = config.mesh
        names, shape = (
            ("batch", "sequence", "heads"),
            (q.shape[0], ways(mesh, sequence), q.shape[2]),
        )
        placed = config.partition_manager.resolve(names, "train", shape, mesh)
        batch, _, heads = (*placed, None, None)[:3]
        bias = P()
        if scoring.bias is not None:
            one_row, one_head = (size == 1 for size in scoring.bias.shape[:2])
            bias = P(None if one_row else batch, None if one_head else heads, sequence)
        settings = mechanism.settings_of("ring")
        return cls(
            spec=Spec.of(scoring, causal=mask_info.causal),
            mesh=mesh,
            batch=batch,
            sequence=sequence,
            heads=heads,
            bias=bias,
            zigzag=mask_info.causal,
            scan=config.scan_ring_attention,
            block_q=settings.block_q or 128,
            block_k=settings.block_k or 128,
            out_dtype=q.dtype if scoring.sinks is None else jnp.dtype(scoring.softmax_dtype),
        )

    @property
    def n(self) -> int:
        """Devices of the ring."""
        return ways(self.mesh, self.sequence)

    @property
    def total_dtype(self) -> Any:
        """Dtype in which the steps are added up."""
        return jnp.promote_types(self.spec.softmax_dtype, jnp.float32)

    def padded(self, x: jax.Array, *axes: int) -> jax.Array:
        """With lengths that divide by the ring along `axes`; zeros are padding (segment 0)."""
        return jnp.pad(x, [(0, -d % self.n if i in axes else 0) for i, d in enumerate(x.shape)])

    def pass_on(self, tree: Any) -> Any:
        """Give what is in hand to the next device."""
        pairs = [(i, (i + 1) % self.n) for i in range(self.n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sequence, pairs), tree)

    def steps(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Go round once: `step(device whose part is in hand, carry)`.

        Unrolled, the compiler drops what the last step passes on for nothing.
        """
        own = jax.lax.axis_index(self.sequence)
        if self.scan:
            return jax.lax.fori_loop(0, self.n, lambda i, x: step((own - i) % self.n, x), carry)
        for i in range(self.n):
            carry = step((own - i) % self.n, carry)
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

    def rows_and_heads(self, b: int, h: int) -> tuple[jax.Array, jax.Array]:
        """Numbers of this device's rows and heads among those of the call."""
        return tuple(  # type: ignore[return-value]
            jnp.arange(size) + (0 if axes is None else jax.lax.axis_index(axes) * size)
            for size, axes in ((b, self.batch), (h, self.heads))
        )

    def sum_of_bias(self, x: jax.Array) -> jax.Array:
        """Add up the gradient of a bias over the devices that have it in common."""
        for own, axes in zip((*self.bias, None, None), (self.batch, self.heads), strict=False):
            if own is None and axes is not None:
                x = jax.lax.psum(x, axes)
        return x


def sequence_axes(config: Any) -> Axes | None:
    """The mesh axes that split the sequence of a model's activations, None where it is whole.

    Args:
        config: with `mesh` and `partition_manager`; what has no mesh runs on one device.
    """
    mesh = getattr(config, "mesh", None)
    if mesh is None:
        return None
    spec = config.partition_manager.resolve(("batch", "sequence"), "train", None, mesh)
    return spec[1] if len(spec) > 1 else None


def ways(mesh: Mesh | AbstractMesh, axes: Axes | None) -> int:
    """In how many parts the axes split a dimension."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)


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

    def places(self, device: int | jax.Array) -> jax.Array:
        """Positions in the whole sequence of a device's blocks, [i, x]; n * L for padding."""
        chunks = chunks_of(device, self.plan.n) if self.plan.zigzag else (device,)
        inside = jnp.arange(-(-self.chunk // self.block) * self.block)
        found = []
        for number in chunks:
            owner, part = number // self.parts, number % self.parts
            # The second chunk of an odd length is one shorter.
            size = jnp.where(part == 0, self.chunk, self.length - self.chunk)
            place = owner * self.length + part * self.chunk + inside
            found.append(jnp.where(inside < size, place, self.plan.n * self.length))
        return jnp.concatenate(found).reshape(-1, self.block)
