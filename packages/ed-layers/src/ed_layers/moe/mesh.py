"""Expert parallelism: the placement of experts on devices, and the exchange of tokens.

Experts never move between devices. The other sharded dimensions decide the exchange:

- devices with the same tokens (along `ep` and `tp`) each compute their experts, and the results are
  summed;
- devices with different tokens (along `fsdp` and `sp`, if experts are sharded over these axes:
  `fsdp_is_ep_bound`, `sp_is_ep_bound`) gather the tokens of the group, and reduce-scatter the
  results. In a ring (`use_ring_of_experts`) each device passes its tokens and partial results to
  the next device, so no device holds more than the tokens of one device.

Legend: b batch, s sequence, d hidden, f intermediate, e experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding.axes import LogicalAxes, split_mesh_axes
from ed_infra.sharding.partition import fit_spec
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_layers.devices import get_mesh_axes, ways
from ed_layers.moe.blocks import ExpertParams, Matrices, require_array

#: `(x, chosen, weights, params) -> out`: applies the experts of one device to its tokens.
Local = Callable[[jax.Array, jax.Array, jax.Array, ExpertParams], jax.Array]


@dataclass(frozen=True)
class ExpertMesh:
    """The sharding of tokens and experts over a mesh.

    Attributes:
        mesh: the devices.
        specs: partition specs of the experts' arrays; a pytree for a quantized matrix.
        tokens: partition specs of x, chosen and weights.
        experts, features: mesh axes over which e and f are sharded.
        ring: whether tokens are passed around a ring or gathered.
    """

    mesh: Mesh
    specs: Mapping[str, Any]
    tokens: PartitionSpec
    experts: tuple[str, ...]
    features: tuple[str, ...]
    ring: bool

    @classmethod
    def of(
        cls,
        config: EasyDeLBaseConfig,
        params: ExpertParams,
        axes: Mapping[str, LogicalAxes],
        shape: tuple[int, ...],
        mode: str,
    ) -> ExpertMesh:
        """Derive the sharding from a configuration.

        Args:
            config: the mesh, the partition axes, and `use_ring_of_experts`.
            params, axes: the experts' arrays and their logical axes.
            shape: shape of x, [b, s, d].
            mode: `ed_layers.context.Ctx.mode`.
        """
        mesh, specs = config.mesh, whole_groups(config, params, axes)
        if config.batch_invariant:  # a sum over devices would have another order
            specs = {name: PartitionSpec(*(None,) * len(spec)) for name, spec in specs.items()}
        by = [split_mesh_axes(entry) for entry in (*specs["up_proj.kernel"], None, None, None)]
        experts, features = by[0], by[2]
        token_axes = get_mesh_axes(
            config, ("batch", "sequence"), shape[:2], "decode" if mode == "decode" else "train"
        )
        rows = [
            tuple(name for name in split_mesh_axes(entry) if name not in features)
            for entry in token_axes
        ]
        if config.use_ring_of_experts:
            # Devices with the same tokens split them, so that each device has tokens to pass on.
            for name in experts:
                for dim in (0, 1) if name not in rows[0] + rows[1] else ():
                    if shape[dim] % ways(mesh, (*rows[dim], name)) == 0:
                        rows[dim] = (*rows[dim], name)
                        break
        tokens = PartitionSpec(*rows)
        placed = {name: spec_tree(specs[name], array) for name, array in params.items()}
        return cls(mesh, placed, tokens, experts, features, config.use_ring_of_experts)

    @property
    def moving(self) -> dict[int, tuple[str, ...]]:
        """The mesh axes that shard both experts and tokens, by dimension of the tokens."""
        shared = {
            dim: tuple(name for name in split_mesh_axes(entry) if name in self.experts)
            for dim, entry in enumerate(self.tokens)
        }
        return {dim: names for dim, names in shared.items() if names}

    def run(
        self,
        local: Local,
        x: Float[Array, "b s d"],
        expert_ids: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        params: ExpertParams,
    ) -> Float[Array, "b s d"]:
        """Return the sum over the experts of each token, computed on the devices of the experts."""
        # One array, so that one collective moves both.
        routes = jnp.concatenate(
            [expert_ids.astype(jnp.float32), weights.astype(jnp.float32)], axis=-1
        )
        body = jax.shard_map(
            lambda *arrays: self.body(local, *arrays),
            mesh=self.mesh,
            in_specs=(self.tokens, self.tokens, dict(self.specs)),
            out_specs=self.tokens,
            check_vma=False,
        )
        return body(x, routes, dict(params))

    def body(
        self, local: Local, x: jax.Array, routes: jax.Array, params: dict[str, jax.Array | Matrices]
    ) -> jax.Array:
        """Compute the part of one device."""
        local_count = params["up_proj.kernel"].shape[0]
        first = jax.lax.axis_index(self.experts) * local_count if self.experts else 0
        if "down_proj.bias" in params:  # Each device with a part of f adds a part of the sum.
            part = require_array(params["down_proj.bias"]) / ways(self.mesh, self.features)
            params = {**params, "down_proj.bias": part}

        def compute(x: jax.Array, routes: jax.Array) -> jax.Array:
            expert_ids, weights = jnp.split(routes, 2, axis=-1)
            number = expert_ids.astype(jnp.int32) - first
            # Experts of other devices get numbers beyond the last local expert.
            number = jnp.where((number >= 0) & (number < local_count), number, local_count)
            return local(x, number, weights, params)

        moving = tuple(name for names in self.moving.values() for name in names)
        if self.ring and moving:
            out = around(compute, x, routes, moving, ways(self.mesh, moving))
        else:
            for dim, names in self.moving.items():
                x, routes = (
                    jax.lax.all_gather(y, names, axis=dim, tiled=True) for y in (x, routes)
                )
            out = compute(x, routes)
            for dim, names in self.moving.items():
                out = jax.lax.psum_scatter(out, names, scatter_dimension=dim, tiled=True)
        remaining_axes = tuple(name for name in self.experts + self.features if name not in moving)
        return jax.lax.psum(out, remaining_axes) if remaining_axes else out


def whole_groups(
    config: EasyDeLBaseConfig, params: ExpertParams, axes: Mapping[str, LogicalAxes]
) -> dict[str, PartitionSpec]:
    """Return the partition specs of the experts' matrices and biases.

    A quantized matrix is split between groups. If one matrix cannot be split, f is not sharded for
    any matrix, because the outputs of the others would not fit its input.
    """
    mesh, specs = config.mesh, {}
    for name, array in params.items():
        # The hidden size is sharded in storage only; the computation uses all of it.
        compute_axes = [None if axis == "embed" else axis for axis in axes[name]]
        spec = config.partition_manager.param(compute_axes, array.shape, mesh)
        pieces = array.shape if isinstance(array, jax.Array) else array.pieces
        fitted = fit_spec(spec, pieces, mesh)[0]
        specs[name] = PartitionSpec(*fitted, *(None,) * (len(pieces) - len(fitted)))
    places = [(name, dim) for name in specs for dim, axis in enumerate(axes[name]) if axis == "mlp"]
    if len({specs[name][dim] for name, dim in places}) > 1:
        for name, dim in places:
            specs[name] = PartitionSpec(*specs[name][:dim], None, *specs[name][dim + 1 :])
    return specs


def spec_tree(spec: PartitionSpec, array: jax.Array | Matrices) -> Any:
    """Return the spec of each array of a matrix; dimensions of size 1 are replicated."""
    return jax.tree.map(
        lambda leaf: PartitionSpec(
            *(entry if size > 1 else None for entry, size in zip(spec, leaf.shape, strict=True))
        ),
        array,
    )


def around(
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    x: Float[Array, "b s d"],
    routes: Float[Array, "b s r"],
    axes: tuple[str, ...],
    devices: int,
) -> Float[Array, "b s d"]:
    """Pass tokens and their results once around the ring of devices along `axes`.

    The chosen experts and weights, a few numbers per token, are gathered at the beginning.
    """
    all_routes = jax.lax.all_gather(routes, axes)
    me = jax.lax.axis_index(axes)
    following = [(i, (i + 1) % devices) for i in range(devices)]

    def step(hand: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        visiting, total = jnp.split(hand, 2, axis=-1)
        total = total + compute(visiting, all_routes[(me - i) % devices])
        # One array, so that each step has one collective.
        hand = jnp.concatenate([visiting, total], axis=-1)
        return jax.lax.ppermute(hand, axes, following), None

    hand = jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)
    hand, _ = jax.lax.scan(step, hand, jnp.arange(devices))
    return hand[..., x.shape[-1] :]
