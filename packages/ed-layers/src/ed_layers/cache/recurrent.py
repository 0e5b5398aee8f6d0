"""A cache for the states of recurrent layers: a fixed number of arrays per row.

Legend: b rows, n sequence slots of a ragged batch, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ed_layers.cache.protocol import States
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import RecurrentSpec, StateSpec
from ed_layers.cache.storage import (
    At,
    Layer,
    Layout,
    Place,
    Storage,
    get_layout,
    locate,
    take_layer,
    take_rows,
    update_layer,
    zeros,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache:
    """Named arrays [b, ...] per layer; in serving, b is the number of state slots.

    The cache does not see the tokens, so the layer handles padding: where `mask_info.q_segment_ids`
    of the step is 0, the layer does not change the state of a row.

    Attributes:
        states: name -> per layer [b, ...].
    """

    states: dict[str, jax.Array | tuple[jax.Array, ...]]

    @classmethod
    def create(
        cls,
        specs: Sequence[RecurrentSpec],
        *,
        batch_size: int,
        layout: Layout = "stacked",
        sharding: Place = None,
    ) -> RecurrentCache:
        """Allocate zeros.

        Args:
            specs: one spec per layer, all equal.
            batch_size: number of rows, or of state slots.
            layout: see `Storage`.
            sharding: placement of the batch, the first dimension of every state; see `Place`.
        """
        if len(set(specs)) != 1:
            raise ValueError(
                f"a RecurrentCache stores layers of one kind, but got {len(set(specs))}: "
                f"{set(specs)}; use a separate group for each kind"
            )

        store = Storage(layout=layout, sharding=sharding)
        placement = store.place(("batch",), (batch_size,))

        def make(lead: tuple[int, ...], state: StateSpec) -> jax.Array:
            return zeros((batch_size, *state.shape), state.dtype, placement, lead=lead)

        states = specs[0].states
        return cls({x.name: store.layers(len(specs), partial(make, state=x)) for x in states})

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return get_layout(next(iter(self.states.values())))

    def select_rows(self, rows: Int[Array, " n"]) -> RecurrentCache:
        """Select rows of the cache; see `ContiguousCache.select_rows`."""
        return RecurrentCache({name: take_rows(x, rows) for name, x in self.states.items()})

    def copy_rows(self, copies: Int[Array, "2 c"], count: Int[Array, ""]) -> RecurrentCache:
        """Copy rows to other rows in all layers, one copy after another.

        Args:
            copies: source and target of each copy.
            count: number of used copies.
        """
        axis, copies = 1 if self.layout == "stacked" else 0, jnp.asarray(copies)

        def copy_one(number: Array, states: dict[str, jax.Array | tuple[jax.Array, ...]]):
            source, target = copies[0, number], copies[1, number]

            def put(array: jax.Array) -> jax.Array:
                row = jax.lax.dynamic_slice_in_dim(array, source, 1, axis)
                return jax.lax.dynamic_update_slice_in_dim(array, row, target, axis)

            return jax.tree.map(put, states)

        return RecurrentCache(jax.lax.fori_loop(0, count, copy_one, self.states))

    def get(
        self, layer: Layer, *, ragged: RaggedBatch | None = None, group: str = "recurrent"
    ) -> States:
        """Return the states of one layer; see `StateCache.get`."""
        located = {name: locate(storage, layer) for name, storage in self.states.items()}
        if ragged is None:
            return {name: take_layer(array, at) for name, (array, at) in located.items()}
        begins = ragged.kv_lens == ragged.q_lens
        states = {}
        for name, (array, at) in located.items():
            rows = array.at[(*at, ragged.state_slots)].get(mode="clip")
            states[name] = jnp.where(begins.reshape(-1, *(1,) * (rows.ndim - 1)), 0, rows)
        return states

    def set(
        self,
        layer: Layer,
        states: Mapping[str, jax.Array],
        *,
        ragged: RaggedBatch | None = None,
        group: str = "recurrent",
    ) -> RecurrentCache:
        """Store the states of one layer; see `StateCache.set`."""
        if set(states) != set(self.states):
            raise ValueError(
                f"this cache keeps the states {sorted(self.states)}, got {sorted(states)}"
            )

        def put(array: jax.Array, at: At, new: jax.Array) -> jax.Array:
            new = new.astype(array.dtype)
            if ragged is None:
                start = (*at, *(0,) * new.ndim)
                block = new.reshape((1,) * len(at) + new.shape)
                return jax.lax.dynamic_update_slice(array, block, start)
            # Unused positions of the batch must not change the state of another sequence.
            used = jnp.arange(ragged.state_slots.shape[0]) < ragged.num_seqs
            targets = ragged.state_targets
            targets = ragged.state_slots if targets is None else targets
            slots = jnp.where(used, targets, array.shape[len(at)])
            return array.at[(*at, slots)].set(new, mode="drop")

        return RecurrentCache(
            {
                name: update_layer(
                    storage, layer, lambda array, at, new=states[name]: put(array, at, new)
                )
                for name, storage in self.states.items()
            }
        )
