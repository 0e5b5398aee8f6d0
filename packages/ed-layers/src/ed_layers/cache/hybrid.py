"""One cache for layers that differ: full attention, windows, cross-attention, recurrence.

Legend: b batch, s new tokens, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.cache.codes import Format
from ed_layers.cache.cross import CrossCache
from ed_layers.cache.dense import DenseCache, counted
from ed_layers.cache.paged import PagedCache
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.recurrent import RecurrentCache, State
from ed_layers.cache.spec import LayerCacheSpec, LayerSpecs, Spec, each
from ed_layers.cache.storage import Layer, Layout
from ed_layers.cache.window import WindowCache

#: Where an array goes, by the names of its axes and its shape.
Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding | None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["caches", "masks", "tokens", "length"],
    meta_fields=["table", "capacity", "layout"],
)
@dataclass(frozen=True)
class HybridCache:
    """A cache of its own for each group of layers.

    A layer says by `group` which of its memories it means, so a layer may have several (self- and
    cross-attention), and a scan over periods may index layers by a traced number.

    Attributes:
        caches: group -> DenseCache, WindowCache, CrossCache, RecurrentCache or PagedCache.
        masks: group -> its mask in this step, between `begin` and `advance`.
        tokens: tokens of each row so far, [b]; None for pages.
        length: slots so far; None for pages.
        table: (group, index of each layer in the group's cache, -1 = not in it), static.
        capacity: slots per row, of contiguous caches.
        layout: how the layers are stored.
    """

    caches: dict[str, Any]
    masks: dict[str, MaskInfo]
    tokens: Int[Array, " b"] | None
    length: Int[Array, ""] | None
    table: tuple[tuple[str, tuple[int, ...]], ...]
    capacity: int
    layout: Layout

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        batch_size: int,
        capacity: int,
        cross_capacity: int | None = None,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        place: Place | None = None,
        format: Format | None = None,
    ) -> HybridCache:
        """Allocate an empty contiguous cache for each group.

        Args:
            specs: what each layer keeps: one spec, or a tuple of specs of different groups.
            batch_size, capacity: rows, and slots per row.
            cross_capacity: positions of an encoder, for specs of the group "cross".
            dtype, layout, format: see `DenseCache.create`.
            place: gives the sharding of [b, g, t, k] by the names of its axes and its shape.
        """
        table, groups = grouped(specs)
        caches: dict[str, Any] = {}
        for group, found in groups.items():
            first = found[0]
            if not isinstance(first, LayerCacheSpec):
                sharding = place(("batch",), (batch_size,)) if place else None
                caches[group] = RecurrentCache.create(
                    found,  # type: ignore[arg-type]  # `grouped` has seen that they are equal
                    batch_size=batch_size,
                    layout=layout,
                    sharding=sharding,
                )
                continue
            kind: Any = DenseCache if first.window is None else WindowCache
            size = capacity
            if group == "cross":
                kind = CrossCache
                if cross_capacity is None:
                    raise ConfigError(
                        "this model reads an encoder: give the cache cross_capacity, the encoder's "
                        "number of positions"
                    )
                size = cross_capacity
            slots = "key_sequence" if kind is DenseCache else None
            axes = ("batch", "kv_heads", slots, None)
            shape = (batch_size, first.num_kv_heads, size, first.head_dim)
            caches[group] = kind.create(
                found,
                batch_size=batch_size,
                capacity=size,
                dtype=dtype,
                layout=layout,
                sharding=place(axes, shape) if place else None,
                format=format,
            )
        zeros = jnp.zeros((batch_size,), jnp.int32)
        return cls(caches, {}, zeros, jnp.zeros((), jnp.int32), table, capacity, layout)

    @classmethod
    def create_paged(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        num_pages: int | Mapping[str, int],
        page_size: int,
        num_states: int | None = None,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        place: Place | None = None,
        format: Format | None = None,
    ) -> HybridCache:
        """Allocate a pool of pages for each group, and states for recurrent layers.

        Args:
            specs: as in `create`.
            num_pages: pages of each group's pool: one number for all, or group -> number.
            page_size: tokens per page.
            num_states: recurrent states that sequences can lease; `RaggedBatch.state_slots` names
                them.
            place: gives the sharding of [P, page_size, g, 2, k].
        """
        table, groups = grouped(specs)
        caches: dict[str, Any] = {}
        for group, found in groups.items():
            first = found[0]
            if not isinstance(first, LayerCacheSpec):
                if num_states is None:
                    raise ConfigError(
                        "this model has recurrent layers: give the paged cache num_states, how "
                        "many sequences can have a state at a time"
                    )
                caches[group] = RecurrentCache.create(
                    found,  # type: ignore[arg-type]
                    batch_size=num_states,
                    layout=layout,
                )
                continue
            if group == "cross":
                raise ConfigError(
                    "pages hold what a decoder says, not an encoder's keys and values; generate() "
                    "runs models with cross-attention"
                )
            pages = num_pages if isinstance(num_pages, int) else num_pages[group]
            shape = (pages, page_size, first.num_kv_heads, 2, max(first.head_dim, first.values))
            caches[group] = PagedCache.create(
                found,
                num_pages=pages,
                page_size=page_size,
                dtype=dtype,
                layout=layout,
                sharding=place((None, None, "kv_heads", None, None), shape) if place else None,
                group=group,
                format=format,
            )
        return cls(caches, {}, None, None, table, 0, layout)

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[HybridCache, MaskInfo, Int[Array, "b s"]]:
        """Announce `s` new tokens to every cache; see `DenseCache.begin`.

        Returns:
            the cache that knows each group's mask, the mask over all slots where layers see them
            all (else among the new tokens), and positions.
        """
        assert self.tokens is not None, "pages are told by a RaggedBatch"
        assert self.length is not None, "pages are told by a RaggedBatch"
        segments = segment_ids.astype(jnp.int32)
        b, s = segments.shape
        caches, masks = dict(self.caches), {}
        for group, cache in self.caches.items():
            if isinstance(cache, DenseCache | WindowCache):
                caches[group], masks[group], _ = cache.begin(segments)
        index = jnp.broadcast_to(self.length + jnp.arange(s, dtype=jnp.int32), (b, s))
        mask = masks.get("full", MaskInfo(segments, segments, index, index))
        tokens = self.tokens + jnp.count_nonzero(segments, axis=1).astype(jnp.int32)
        positions = counted(self.tokens, segments)
        return replace(self, caches=caches, masks=masks, tokens=tokens), mask, positions

    def update(
        self,
        layer: Layer,
        kv: tuple[jax.Array, jax.Array] | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[HybridCache, Any]:
        """Store this step's keys and values of one layer; give what its attention reads.

        Args:
            layer: number of the layer in the model.
            mask_info: of an encoder, for the group "cross"; the others have theirs from `begin`.
        """
        cache, stored = self.caches[self.known(group)].update(
            self.index(layer, group),
            kv,
            mask_info=self.masks.get(group, mask_info),
            ragged=ragged,
            group=group,
        )
        return self.with_group(group, cache), stored

    def get(
        self, layer: Layer, *, ragged: RaggedBatch | None = None, group: str = "recurrent"
    ) -> State:
        """The states of a recurrent layer; see `RecurrentCache.get`."""
        return self.caches[self.known(group)].get(self.index(layer, group), ragged=ragged)

    def set(
        self,
        layer: Layer,
        states: Mapping[str, jax.Array],
        *,
        ragged: RaggedBatch | None = None,
        group: str = "recurrent",
    ) -> HybridCache:
        """Store the states of a recurrent layer; see `RecurrentCache.set`."""
        cache = self.caches[self.known(group)]
        return self.with_group(group, cache.set(self.index(layer, group), states, ragged=ragged))

    def advance(self, count: int) -> HybridCache:
        """Move the write positions after every layer has written its `count` tokens."""
        assert self.length is not None, "pages do not advance"
        caches = {
            group: cache.advance(count) if group in self.masks else cache
            for group, cache in self.caches.items()
        }
        return replace(self, caches=caches, masks={}, length=self.length + count)

    def index(self, layer: Layer, group: str) -> Layer:
        """Index of a layer of the model in its group's cache; static where the layer is.

        Raises:
            ValueError: the layer is not of that group.
        """
        row = dict(self.table)[group]
        if not isinstance(layer, int):
            return jnp.asarray(row, jnp.int32)[layer]
        if row[layer] < 0:
            groups = [name for name, other in self.table if other[layer] >= 0]
            raise ValueError(
                f"layer {layer} keeps nothing in group {group!r}, but in {', '.join(groups)}: pass "
                "its group to attend(..., group=...)"
            )
        return row[layer]

    def known(self, group: str) -> str:
        """The group, if there is a cache for it.

        Raises:
            ValueError: there is none.
        """
        if group in self.caches:
            return group
        raise ValueError(
            f"this cache has no group {group!r} (it has: {', '.join(self.caches)}): "
            "cache_specs() of the model and the group that its layers pass to attend() differ"
        )

    def with_group(self, group: str, cache: Any) -> HybridCache:
        """Replace the cache of one group."""
        return replace(self, caches={**self.caches, group: cache})


def grouped(
    specs: Sequence[LayerSpecs],
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], dict[str, list[Spec]]]:
    """Sort layers into groups.

    Returns:
        the table (group, index of each layer in the group or -1), and the specs of each group.

    Raises:
        ValueError: the specs of a group differ, or a layer has two of one group.
    """
    groups: dict[str, list[Spec]] = {}
    table: dict[str, list[int]] = {}
    for layer, of_layer in enumerate(specs):
        for spec in each(of_layer):
            row = table.setdefault(spec.group, [-1] * len(specs))
            found = groups.setdefault(spec.group, [])
            if row[layer] >= 0:
                raise ValueError(f"layer {layer} has two specs of group {spec.group!r}")
            if found and found[0] != spec:
                raise ValueError(
                    f"layers of group {spec.group!r} differ: {found[0]} and {spec}; give each kind "
                    "a group of its own"
                )
            row[layer] = len(found)
            found.append(spec)
    return tuple((group, tuple(row)) for group, row in table.items()), groups
