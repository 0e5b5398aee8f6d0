"""One cache for different layers: full attention, windows, cross-attention, recurrence.

Legend: b batch, s new tokens, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.cache.contiguous import DenseCache, WindowCache, add_offsets, compute_positions
from ed_layers.cache.cross import CrossCache, CrossSlots
from ed_layers.cache.paged import PagedCache
from ed_layers.cache.protocol import KeysValues, NewKeys, Pages, States, StoredLayer
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.recurrent import RecurrentCache
from ed_layers.cache.spec import LayerCacheSpec, LayerSpecs, RecurrentSpec, Table, group_layers
from ed_layers.cache.storage import Layer, Layout, Storage, StorageOptions, replicate_place

LayerCache = DenseCache | WindowCache | CrossCache | PagedCache | CrossSlots | RecurrentCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HybridCache:
    """A separate cache for each group of layers.

    A layer names its cache by `group`, so a layer may have several caches (self- and
    cross-attention), and a scan over periods may index layers by a traced number.

    Attributes:
        caches: group -> the cache of its layers.
        masks: group -> its mask in this step, between `begin` and `advance`.
        tokens: number of tokens of each row, [b]; None for pages.
        table: index of each layer in the cache of each group, static.
        capacity: maximum number of tokens of a row; None for pages.
        offsets: rotary position of the next token minus `tokens`, [b]; None = 0.
    """

    caches: dict[str, LayerCache]
    masks: dict[str, MaskInfo]
    tokens: Int[Array, " b"] | None
    table: Table = field(metadata={"static": True})
    capacity: int | None = field(metadata={"static": True})
    offsets: Int[Array, " b"] | None = None

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        batch_size: int,
        capacity: int,
        cross_capacity: int | None = None,
        rings: bool = True,
        **storage: Unpack[StorageOptions],
    ) -> HybridCache:
        """Allocate an empty contiguous cache for each group.

        Args:
            specs: the memory of each layer: one spec, or a tuple of specs of different groups.
            batch_size, capacity: number of rows, and maximum number of tokens of a row.
            cross_capacity: positions of an encoder, for specs of the group "cross".
            rings: whether layers with a window store only the tokens of the window; False = all
                tokens, in their order.
            storage: see `Storage`.

        Raises:
            ConfigError: `cross_capacity` is missing.
        """

        def make(group: str, specs: Sequence[LayerCacheSpec]) -> LayerCache:
            window, size = specs[0].window, capacity
            # A window that is longer than every row drops no token.
            ring = rings and window is not None and window < capacity
            kind = WindowCache if ring else DenseCache
            if group == "cross":
                if cross_capacity is None:
                    raise ConfigError(
                        "this model reads an encoder: pass cross_capacity to the cache, the number "
                        "of positions of the encoder"
                    )
                kind, size = CrossCache, cross_capacity
            return kind.create(specs, batch_size=batch_size, capacity=size, **storage)

        caches, table = memories(specs, make, batch_size, storage)
        return cls(caches, {}, jnp.zeros((batch_size,), jnp.int32), table, capacity)

    @classmethod
    def create_paged(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        num_pages: int | Mapping[str, int],
        page_size: int,
        num_states: int | None = None,
        cross_capacity: int | None = None,
        **storage: Unpack[StorageOptions],
    ) -> HybridCache:
        """Allocate a pool of pages for each group, and slots for states and encoder outputs.

        Args:
            specs: see `create`.
            num_pages: pages of each group's pool: one number for all, or group -> number.
            page_size: tokens per page.
            num_states: slots that sequences can lease, for recurrent layers and encoder outputs.
            cross_capacity: encoder positions of a slot, for specs of the group "cross".
            storage: see `Storage`.

        Raises:
            ConfigError: `num_states`, `cross_capacity` or a group of `num_pages` is missing.
        """

        def make(group: str, specs: Sequence[LayerCacheSpec]) -> LayerCache:
            if group == "cross":
                if num_states is None or cross_capacity is None:
                    raise ConfigError(
                        "this model reads an encoder: give the paged cache num_states, how many "
                        "sequences can have an encoder output at a time, and cross_capacity, the "
                        "encoder's number of positions"
                    )
                return CrossSlots.create(
                    specs,
                    num_slots=num_states,
                    capacity=cross_capacity,
                    page_size=page_size,
                    **storage,
                )
            pages = num_pages if isinstance(num_pages, int) else num_pages.get(group)
            if pages is None:
                raise ConfigError(
                    f"num_pages={num_pages} has no pages for the layers of group {group!r}; name "
                    "each group of the model, or pass one number for all"
                )
            return PagedCache.create(
                specs, num_pages=pages, page_size=page_size, group=group, **storage
            )

        # Any sequence may lease any state slot, so state slots are not split over devices.
        states: StorageOptions = {**storage, "sharding": replicate_place(storage.get("sharding"))}
        caches, table = memories(specs, make, num_states, states)
        return cls(caches, {}, None, table, None)

    def simplest(self) -> DenseCache | WindowCache | PagedCache | HybridCache:
        """Return the cache of the only group if every layer has its keys and values, and no other
        memory, in this group; otherwise this cache."""
        if len(self.table) == 1 and -1 not in self.table[0][1]:
            cache = self.caches[self.table[0][0]]
            if isinstance(cache, DenseCache | WindowCache | PagedCache):
                return cache
        return self

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return next(iter(self.caches.values())).layout

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[HybridCache, MaskInfo, Int[Array, "b s"]]:
        """Start a step in every cache; see `ContiguousCache.begin`.

        Returns:
            The cache with the mask of each group; the mask over all slots if some layers see all
            slots, otherwise over the new tokens; and the positions.
        """
        if self.tokens is None:
            raise ValueError(
                "a cache of pages reads the tokens of a step from a RaggedBatch: call the model "
                "with ragged=..., or with a cache from init_cache()"
            )
        real = segment_ids != 0
        caches, masks = dict(self.caches), {}
        for group, cache in self.caches.items():
            if isinstance(cache, DenseCache | WindowCache):
                caches[group], masks[group], _ = cache.begin(segment_ids)
        positions, segments = compute_positions(self.tokens, real), real.astype(jnp.int32)
        mask = masks.get("full", MaskInfo(segments, segments, positions, positions))
        tokens = self.tokens + jnp.count_nonzero(real, axis=1).astype(jnp.int32)
        cache = replace(self, caches=caches, masks=masks, tokens=tokens)
        return cache, mask, add_offsets(positions, self.offsets)

    def with_offsets(self, offsets: Int[Array, " b"]) -> HybridCache:
        """Set the offsets of rotary positions; see `ContiguousCache.with_offsets`."""
        return replace(self, offsets=offsets)

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[HybridCache, StoredLayer | Pages]:
        """Store the keys and values of one layer; return the arrays that attention reads.

        Args:
            layer: number of the layer in the model.
            mask_info: the mask of an encoder, for the group "cross"; `begin` creates the other
                masks.
        """
        cache, index = self.memory(layer, group)
        if isinstance(cache, RecurrentCache):
            raise ValueError(f"group {group!r} keeps states: its layers call get() and set()")
        mask_info = self.masks.get(group, mask_info)
        cache, stored = cache.update(index, kv, mask_info=mask_info, ragged=ragged)
        return replace(self, caches={**self.caches, group: cache}), stored

    def write_encoded(
        self,
        layer: Layer,
        kv: KeysValues,
        slot: int | Int[Array, ""],
        segment_ids: Int[Array, "1 t"],
        *,
        group: str = "cross",
    ) -> HybridCache:
        """Write the keys and values of one encoder output into a slot; see `CrossSlots.write`."""
        cache, index = self.memory(layer, group)
        if not isinstance(cache, CrossSlots):
            raise ValueError(f"group {group!r} has no slots of encoder outputs")
        cache = cache.write(index, kv, slot, segment_ids)
        return replace(self, caches={**self.caches, group: cache})

    def get(
        self, layer: Layer, *, ragged: RaggedBatch | None = None, group: str = "recurrent"
    ) -> States:
        """Return the states of a recurrent layer; see `StateCache.get`."""
        cache, index = self.states(layer, group)
        return cache.get(index, ragged=ragged)

    def set(
        self,
        layer: Layer,
        states: Mapping[str, jax.Array],
        *,
        ragged: RaggedBatch | None = None,
        group: str = "recurrent",
    ) -> HybridCache:
        """Store the states of a recurrent layer; see `StateCache.set`."""
        cache, index = self.states(layer, group)
        cache = cache.set(index, states, ragged=ragged)
        return replace(self, caches={**self.caches, group: cache})

    def advance(self, count: int) -> HybridCache:
        """End a step; see `ContiguousCache.advance`."""
        caches = {
            group: cache.advance(count) if isinstance(cache, DenseCache | WindowCache) else cache
            for group, cache in self.caches.items()
        }
        return replace(self, caches=caches, masks={})

    def select_rows(self, rows: Int[Array, " n"]) -> HybridCache:
        """Select rows of the cache; see `ContiguousCache.select_rows`."""
        caches: dict[str, LayerCache] = {}
        for group, cache in self.caches.items():
            if self.tokens is None or isinstance(cache, PagedCache | CrossSlots):
                raise ValueError("pages have no rows: a RaggedBatch assigns pages to sequences")
            caches[group] = cache.select_rows(rows)
        tokens = None if self.tokens is None else self.tokens[rows]
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, caches=caches, tokens=tokens, offsets=offsets)

    @property
    def can_rewind(self) -> bool:
        """Whether `rewind` is possible in the caches of all groups; see
        `ContiguousCache.can_rewind`."""
        return all(isinstance(cache, DenseCache) for cache in self.caches.values())

    def rewind(self, tokens: Int[Array, " b"]) -> HybridCache:
        """Keep the first `tokens` of each row; see `ContiguousCache.rewind`."""
        caches: dict[str, LayerCache] = {}
        for group, cache in self.caches.items():
            if not isinstance(cache, DenseCache):
                raise ValueError(
                    f"the layers of group {group!r} cannot drop their last tokens; check can_rewind"
                )
            caches[group] = cache.rewind(tokens)
        return replace(self, caches=caches, tokens=tokens)

    def states(self, layer: Layer, group: str) -> tuple[RecurrentCache, Layer]:
        """Return the cache of a recurrent layer, and the index of the layer in this cache."""
        cache, index = self.memory(layer, group)
        if isinstance(cache, RecurrentCache):
            return cache, index
        raise ValueError(f"group {group!r} keeps keys and values: its layers call update()")

    def memory(self, layer: Layer, group: str) -> tuple[LayerCache, Layer]:
        """Return the cache of a group, and the index of a layer of the model in this cache; the
        index is static if the number of the layer is.

        Raises:
            ValueError: the group does not exist, or does not contain the layer.
        """
        if group not in self.caches:
            raise ValueError(
                f"this cache has no group {group!r} (its groups: {', '.join(self.caches)}); "
                "cache_specs() of the model and the group that its layers pass to attend() differ"
            )
        row = dict(self.table)[group]
        if not isinstance(layer, int):
            return self.caches[group], jnp.asarray(row, jnp.int32)[layer]
        if row[layer] >= 0:
            return self.caches[group], row[layer]
        groups = ", ".join(name for name, group_row in self.table if group_row[layer] >= 0)
        raise ValueError(
            f"layer {layer} keeps nothing in group {group!r}, but in {groups}: pass attend() the "
            "group of the layer's spec"
        )


def memories(
    specs: Sequence[LayerSpecs],
    make: Callable[[str, Sequence[LayerCacheSpec]], LayerCache],
    num_states: int | None,
    storage: StorageOptions,
) -> tuple[dict[str, LayerCache], Table]:
    """Create the cache of each group, and the table of the layers.

    Args:
        make: creates the cache of a group with keys and values.
        num_states: rows, or state slots, of recurrent layers.
    """
    store, (table, groups) = Storage(**storage), group_layers(specs)
    caches: dict[str, LayerCache] = {}
    for group, members in groups.items():
        states = [spec for spec in members if isinstance(spec, RecurrentSpec)]
        if not states:
            caches[group] = make(group, [x for x in members if isinstance(x, LayerCacheSpec)])
        elif num_states is None:
            raise ConfigError(
                "this model has recurrent layers: pass num_states to the paged cache, the number "
                "of sequences that can have a state at a time"
            )
        else:
            caches[group] = RecurrentCache.create(
                states, batch_size=num_states, layout=store.layout, sharding=store.sharding
            )
    return caches, table
