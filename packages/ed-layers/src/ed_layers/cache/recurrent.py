"""The place for the states of recurrent layers: a fixed number of arrays per row.

Legend: b rows, n sequence slots of a ragged batch, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import RecurrentSpec
from ed_layers.cache.storage import (
    Layer,
    Layout,
    PerLayer,
    allocate,
    layer_of,
    layout_of,
    locate,
    update_layer,
)

State = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["states"], meta_fields=[])
@dataclass(frozen=True)
class RecurrentCache:
    """Named arrays [b, ...] per layer; in serving, b is a number of states that sequences lease.

    Attributes:
        states: name -> per layer [b, ...].
    """

    states: dict[str, PerLayer]

    @classmethod
    def create(
        cls,
        specs: Sequence[RecurrentSpec],
        *,
        batch_size: int,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
    ) -> RecurrentCache:
        """Allocate zeros.

        Args:
            specs: one per layer, all equal.
            batch_size: rows, or states of a pool.
            sharding: of the batch, the first dimension of every state.
        """
        if len(set(specs)) != 1:
            raise ValueError(
                f"a RecurrentCache stores layers of one kind, but got {len(set(specs))}: "
                f"{set(specs)}; give each kind a group of its own"
            )

        def make(lead: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> jax.Array:
            zeros = jnp.zeros((*lead, batch_size, *shape), dtype)
            if not isinstance(sharding, jax.sharding.NamedSharding):
                return zeros if sharding is None else jax.device_put(zeros, sharding)
            spec = jax.sharding.PartitionSpec(*(None,) * len(lead), *sharding.spec[:1])
            return jax.device_put(zeros, jax.sharding.NamedSharding(sharding.mesh, spec))

        return cls(
            {
                state.name: allocate(
                    len(specs), layout, lambda lead, s=state: make(lead, s.shape, s.dtype)
                )
                for state in specs[0].states
            }
        )

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return layout_of(next(iter(self.states.values())))

    def get(self, layer: Layer, *, ragged: RaggedBatch | None = None) -> State:
        """The states of one layer, name -> [b, ...].

        Args:
            ragged: give those of its sequences, [n, ...]; zeros for one that begins in this step,
                whoever had its state before.
        """
        if ragged is None:
            return {name: layer_of(storage, layer) for name, storage in self.states.items()}
        begins = ragged.kv_lens == ragged.q_lens
        found = {}
        for name, storage in self.states.items():
            array, at = locate(storage, layer)
            rows = array.at[(*at, ragged.state_slots)].get(mode="clip")
            found[name] = jnp.where(begins.reshape(-1, *(1,) * (rows.ndim - 1)), 0, rows)
        return found

    def set(
        self, layer: Layer, states: Mapping[str, jax.Array], *, ragged: RaggedBatch | None = None
    ) -> RecurrentCache:
        """Store the states of one layer, as `get` gave them.

        Raises:
            ValueError: the names are not those of the cache.
        """
        if set(states) != set(self.states):
            raise ValueError(
                f"this cache keeps the states {sorted(self.states)}, got {sorted(states)}"
            )
        stored = {}
        for name, storage in self.states.items():
            new = states[name]

            def put(array: jax.Array, at: tuple[Layer, ...], new: Any = new) -> jax.Array:
                new = new.astype(array.dtype)
                if ragged is not None:
                    # Sequence slots that are not in use must not touch the state of another.
                    used = jnp.arange(ragged.state_slots.shape[0]) < ragged.num_seqs
                    rows = array.shape[len(at)]
                    slots = jnp.where(used, ragged.state_slots, rows)
                    return array.at[(*at, slots)].set(new, mode="drop")
                start = (*at, *(0,) * new.ndim)
                return jax.lax.dynamic_update_slice(
                    array, new.reshape((1,) * len(at) + new.shape), start
                )

            stored[name] = update_layer(storage, layer, put)
        return replace(self, states=stored)
