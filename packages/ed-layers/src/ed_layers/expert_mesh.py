"""Experts on many devices: which device has which, and how tokens come to them.

No device gets an expert of another one. What is split over the devices besides experts says what
moves instead:

- devices that have the same tokens (along `ep` and `tp`) each compute their share, and the results
  are added up;
- devices that have tokens of their own (along `fsdp` and `sp`, where experts are split over these:
  `fsdp_is_ep_bound`, `sp_is_ep_bound`) collect each other's tokens, and add up and split the
  results; in a ring (`use_ring_of_experts`) each device passes its tokens on to the next one, with
  the results so far, so that it never holds more than one device's tokens.

Legend: b batch, s sequence, d hidden, f intermediate, e experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.axes import split
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.partition import fit_spec
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_layers.attention.devices import axes_of, ways
from ed_layers.expert_blocks import Matrices, Params, plain
from ed_layers.linear import Axes

#: `(x, chosen, weights, params) -> out`: the experts of one device on the tokens it has.
Local = Callable[[jax.Array, jax.Array, jax.Array, Params], jax.Array]


@dataclass(frozen=True)
class ExpertMesh:
    """How tokens and experts are split over the devices of a mesh.

    Attributes:
        mesh: the devices.
        specs: of the experts' arrays; of a quantized matrix in its structure.
        tokens: of x, chosen and weights.
        experts, features: mesh axes over which e and f are split.
        ring: whether tokens go round, or are collected.
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
        params: Params,
        axes: Mapping[str, Axes],
        shape: tuple[int, ...],
        mode: str,
    ) -> ExpertMesh:
        """Work it out.

        Args:
            config: says the mesh, what is split over which of its axes, and `use_ring_of_experts`.
            params, axes: the experts' arrays and their logical axes.
            shape: of x, [b, s, d].
            mode: of `ed_layers.context.Ctx`.
        """
        mesh, specs = config.mesh, whole_groups(config, params, axes)
        by = [split(entry) for entry in (*specs["up_proj.kernel"], None, None, None)]
        experts, features = by[0], by[2]
        own = axes_of(
            config, ("batch", "sequence"), shape[:2], "decode" if mode == "decode" else "train"
        )
        rows = [tuple(name for name in split(entry) if name not in features) for entry in own]
        if config.use_ring_of_experts:
            # Devices that have the same tokens share them out, to have something to pass on.
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
        """The mesh axes that split experts and tokens alike, by the dimension of the tokens."""
        shared = {
            dim: tuple(name for name in split(entry) if name in self.experts)
            for dim, entry in enumerate(self.tokens)
        }
        return {dim: names for dim, names in shared.items() if names}

    def run(
        self,
        local: Local,
        x: Float[Array, "b s d"],
        chosen: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        params: Params,
    ) -> Float[Array, "b s d"]:
        """Return the sum over the experts of each token, computed where the experts are."""
        # One array, so that one collective moves both.
        routes = jnp.concatenate([chosen.astype(jnp.float32), weights.astype(jnp.float32)], axis=-1)
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
        """What one device does."""
        own = params["up_proj.kernel"].shape[0]
        first = jax.lax.axis_index(self.experts) * own if self.experts else 0
        if "down_proj.bias" in params:  # each device that has a part of f adds a part of it
            part = plain(params["down_proj.bias"]) / ways(self.mesh, self.features)
            params = {**params, "down_proj.bias": part}

        def compute(x: jax.Array, routes: jax.Array) -> jax.Array:
            chosen, weights = jnp.split(routes, 2, axis=-1)
            number = chosen.astype(jnp.int32) - first
            # Experts of other devices are beyond the last.
            number = jnp.where((number >= 0) & (number < own), number, own)
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
        rest = tuple(name for name in self.experts + self.features if name not in moving)
        return jax.lax.psum(out, rest) if rest else out


def whole_groups(
    config: EasyDeLBaseConfig, params: Params, axes: Mapping[str, Axes]
) -> dict[str, PartitionSpec]:
    """The specs of the experts' matrices and biases, as each device computes with its part alone.

    A quantized matrix is cut between groups. Where that is not possible for one matrix, f is not
    split for any: the results of the others would not be what it takes.
    """
    mesh, specs = config.mesh, {}
    for name, array in params.items():
        # Parts of the hidden size are parts of what is stored, not of what is computed.
        own = [None if axis == "embed" else axis for axis in axes[name]]
        spec = config.partition_manager.param(own, array.shape, mesh)
        pieces = array.shape if isinstance(array, jax.Array) else array.pieces
        fitted = fit_spec(spec, pieces, mesh)[0]
        specs[name] = PartitionSpec(*fitted, *(None,) * (len(pieces) - len(fitted)))
    places = [(name, dim) for name in specs for dim, axis in enumerate(axes[name]) if axis == "mlp"]
    if len({specs[name][dim] for name, dim in places}) > 1:
        for name, dim in places:
            specs[name] = PartitionSpec(*specs[name][:dim], None, *specs[name][dim + 1 :])
    return specs


def spec_tree(spec: PartitionSpec, array: jax.Array | Matrices) -> Any:
    """The spec of each array of a matrix; a dimension of size 1 belongs to all parts."""
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
    """Pass tokens and their results round the devices along `axes`, once.

    The routes, a few numbers for a token, are collected at the beginning.
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

    hand: Any = jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)
    hand, _ = jax.lax.scan(step, hand, jnp.arange(devices))
    return hand[..., x.shape[-1] :]
