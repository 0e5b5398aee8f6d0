"""Protocols between models, layers, engines and caches, and the records that attention reads.

A contiguous cache has rows, and all rows advance together: a model calls `begin`, each layer calls
`update` (a recurrent layer `get` and `set`), and the model calls `advance`. Sequences lease pages
and state slots of the other caches. An engine manages the leases, and a `RaggedBatch` names the
pages and slots of a step. Layers call the same methods with the `RaggedBatch`, without `begin` and
`advance`.

Legend: b batch, s new tokens, g kv heads, t slots, k numbers of a key, d numbers of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

import jax
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.cache.codes import Codes, Numbers
from ed_layers.cache.spec import LayerCacheSpec as LayerCacheSpec
from ed_layers.cache.storage import At, Layout, take_layer
from ed_layers.cache.storage import Layer as Layer

if TYPE_CHECKING:
    from ed_layers.cache.ragged import RaggedBatch

#: Keys [b, s, g, k] and values [b, s, g, d] of a step; values are None if the keys contain them.
KeysValues = tuple[jax.Array, jax.Array | None]


class KeysWriter(Protocol):
    """Keys and values of a step that a kernel computes while it writes them into pages."""

    def can_write(self, pages: Numbers) -> bool:
        """Return whether the kernel writes into these pages."""
        ...

    def write(self, pages: Numbers, at: At, slots: Int[Array, " T"]) -> Numbers:
        """Return the pages with the keys and values of one layer.

        Args:
            pages: see `Pages.pool`.
            at: index of the layer in the pages.
            slots: slot of each token; see `RaggedBatch.slots`.
        """
        ...

    def compute(self) -> tuple[jax.Array, jax.Array]:
        """Return keys [1, T, g, k] and values [1, T, g, d], for other caches and pages."""
        ...


#: What a layer stores in a step.
NewKeys = KeysValues | KeysWriter

#: States of one recurrent layer: name -> [rows, ...].
States = dict[str, jax.Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "at", "mask_info"],
    meta_fields=["layout", "ordered", "sharding"],
)
@dataclass(frozen=True)
class StoredLayer:
    """One layer of a contiguous cache, as attention reads it.

    Attributes:
        keys, values: [b, g, t, k] and [b, g, t, d], or with a leading layer axis.
        at: index of the layer in keys and values, `(layer,)` or `()`.
        mask_info: the mask over the slots.
        layout: storage layout of the layers; a layer of "leaves" is read without a copy.
        ordered: whether slot i holds the token of order index i, so that slots after the newest
            token are empty.
        sharding: sharding of [b, g, t, k] if slots are split over devices; otherwise None.
    """

    keys: Numbers
    values: Numbers
    at: At
    mask_info: MaskInfo
    layout: Layout
    ordered: bool = False
    sharding: jax.sharding.NamedSharding | None = None

    @property
    def k(self) -> Numbers:
        """The keys of the layer, [b, g, t, k]."""
        return take_layer(self.keys, self.at)

    @property
    def v(self) -> Numbers:
        """The values of the layer, [b, g, t, d]."""
        return take_layer(self.values, self.at)

    @property
    def quantized(self) -> bool:
        """Whether the arrays are quantized."""
        return isinstance(self.keys, Codes)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "at", "ragged"],
    meta_fields=["group", "value_dim"],
)
@dataclass(frozen=True)
class Pages:
    """One layer of a paged cache, as attention reads it: attention gathers the pages of the
    sequences, never the pool of a layer.

    Attributes:
        pool: [P, page_size, g, 2, k], or with a leading layer axis; codes and scales if quantized.
            The axis of size 2 has size 1 if values are part of their keys.
        at: index of the layer in the pool, `(layer,)` or `()`.
        group: the page table of the RaggedBatch.
        value_dim: numbers of a value; None = the size of a key.
        ragged: the sequences that attention reads, if they differ from the sequences of the step.
    """

    pool: Numbers
    at: At
    group: str
    value_dim: int | None = None
    ragged: RaggedBatch | None = None


class Cache(Protocol):
    """A pytree that a step receives as a donated argument and returns; a scan over layers carries
    it."""

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        ...

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[Self, StoredLayer | Pages]:
        """Store the keys and values of one layer, and return the arrays that attention reads.

        Args:
            layer: number of the layer in the model.
            kv: keys and values, or a kernel that writes them into pages; None if a layer of the
                group "cross" only reads.
            mask_info: the mask that `begin` returned. With keys and values of an encoder,
                `kv_segment_ids` is 0 for padding of the encoder.
            ragged: the flat batch of a serving step, for pages.
            group: the cache group of the layer; see `LayerCacheSpec`.
        """
        ...


class ContiguousCache(Cache, Protocol):
    """A cache of rows, which `model.init_cache` creates. A model calls these methods around its
    layers."""

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens of a row; None = unlimited."""
        ...

    def begin(self, segment_ids: Int[Array, "b s"]) -> tuple[Self, MaskInfo, Int[Array, "b s"]]:
        """Start a step.

        Padding may be at any position. The cache does not store padding, and positions, windows and
        chunks do not count padding.

        Args:
            segment_ids: nonzero for a token, 0 for padding.

        Returns:
            The cache for the layers, the mask of this step, and the rotary positions of the tokens.

        Raises:
            ValueError: a row has more tokens than `capacity`. Inside jit, the number of tokens is
                unknown: a step wider than `capacity` raises this error, and a row that exceeds
                `capacity` over several steps produces NaN.
        """
        ...

    def advance(self, count: int) -> Self:
        """End the step after all layers have run.

        Raises:
            ValueError: no step with `count` positions has started.
        """
        ...

    def select_rows(self, rows: Int[Array, " n"]) -> Self:
        """Select rows of the cache between two steps; a row may occur several times."""
        ...

    @property
    def tokens(self) -> Int[Array, " b"] | None:
        """The number of tokens of each row; None for pages."""
        ...

    @property
    def offsets(self) -> Int[Array, " b"] | None:
        """The rotary position of the next token of each row minus `tokens`; None = 0."""
        ...

    def with_offsets(self, offsets: Int[Array, " b"]) -> Self:
        """Set `offsets`, between two steps: the features of an image have fewer rotary positions
        than tokens, so the positions of the following tokens are smaller than their numbers."""
        ...

    @property
    def can_rewind(self) -> bool:
        """Whether `rewind` is possible: not for rings and states."""
        ...

    def rewind(self, tokens: Int[Array, " b"]) -> Self:
        """Keep the first `tokens` of each row, and drop the others, between two steps.

        Raises:
            ValueError: the cache contains rings or states.
        """
        ...


class StateCache(Protocol):
    """The interface of a recurrent layer to a cache of rows or of state slots."""

    def get(
        self, layer: Layer, *, ragged: RaggedBatch | None = None, group: str = "recurrent"
    ) -> States:
        """Return the states of one layer before this step, for the rows or for the sequences of
        `ragged`.

        A sequence that begins in this step receives zeros, whatever its state slot contains. A
        preempted sequence that is recomputed from its first token also begins.
        """
        ...

    def set(
        self,
        layer: Layer,
        states: Mapping[str, jax.Array],
        *,
        ragged: RaggedBatch | None = None,
        group: str = "recurrent",
    ) -> Self:
        """Store the states of one layer after this step, with the names that `get` returned.

        Raises:
            ValueError: the names differ from the names of the cache.
        """
        ...


def keys_values(kv: NewKeys | None, *, values_in_keys: bool) -> KeysValues:
    """Return the keys and values of this step as arrays.

    Raises:
        ValueError: `kv` is None.
    """
    if kv is not None and not isinstance(kv, tuple | list):
        kv = kv.compute()
    if kv is None or (kv[1] is None and not values_in_keys):
        raise ValueError(
            f"a layer gave no {'keys and ' if kv is None else ''}values to a cache that stores "
            'each step\'s own; only layers of the group "cross" read earlier keys and values, and '
            "only layers with LayerCacheSpec(values_in_keys=True) have no separate values"
        )
    return kv
