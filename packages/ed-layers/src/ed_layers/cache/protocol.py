"""What layers, models and engines call on a cache, and what attention reads of one.

A contiguous cache has rows, which take every step together: a model calls `begin`, then each layer
`update` (a recurrent one `get` and `set`), then the model `advance`. Pages and state slots are
leased by sequences: an engine keeps the books and says by a `RaggedBatch` which of them a step
means. Layers call the same methods with it, and there is neither `begin` nor `advance`.

Legend: b batch, s new tokens, g kv heads, t slots, k numbers of a key, d numbers of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import jax
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.cache.codes import Codes, Numbers
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerCacheSpec as LayerCacheSpec
from ed_layers.cache.storage import At, Layout, take_layer
from ed_layers.cache.storage import Layer as Layer

#: A step's keys [b, s, g, k] and values [b, s, g, d]; values may be None where keys hold them.
KeysValues = tuple[jax.Array, jax.Array | None]

#: States of one recurrent layer: name -> [rows, ...].
States = dict[str, jax.Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "at", "mask_info"],
    meta_fields=["layout", "ordered", "sharding"],
)
@dataclass(frozen=True)
class Stored:
    """What attention reads of one layer of a contiguous cache.

    Attributes:
        keys, values: [b, g, t, k] and [b, g, t, d], or with a leading layer axis.
        at: index of the layer in keys and values, `(layer,)` or `()`.
        mask_info: who may attend to which slot.
        layout: how the cache stores its layers; where they are leaves, reading one copies nothing.
        ordered: slot i holds the token of order index i, so slots behind the newest are empty.
        sharding: of [b, g, t, k] where slots are split over devices; None = they are not.
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
        """Keys of the layer, [b, g, t, k]."""
        return take_layer(self.keys, self.at)

    @property
    def v(self) -> Numbers:
        """Values of the layer, [b, g, t, d]."""
        return take_layer(self.values, self.at)

    @property
    def quantized(self) -> bool:
        """Whether codes are stored."""
        return isinstance(self.keys, Codes)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "at", "ragged"],
    meta_fields=["group", "value_dim"],
)
@dataclass(frozen=True)
class Pages:
    """What attention reads of one layer of a paged cache: it gathers the pages that a sequence has,
    never the pool of a layer.

    Attributes:
        pool: [P, page_size, g, 2, k], or with a leading layer axis; codes and scales if quantized.
            Where values are part of their keys, the axis of two has one entry.
        at: index of the layer in the pool, `(layer,)` or `()`.
        group: which page table of the RaggedBatch.
        value_dim: numbers of a value; None = as many as a key.
        ragged: the sequences that attention sees, if they differ from those of the step.
    """

    pool: Numbers
    at: At
    group: str
    value_dim: int | None = None
    ragged: RaggedBatch | None = None


class Cache(Protocol):
    """A pytree that a step donates and gets back; a scan over layers carries it."""

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        ...

    def update(
        self,
        layer: Layer,
        kv: KeysValues | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[Self, Stored | Pages]:
        """Store this step's keys and values of one layer, and give what its attention reads.

        Args:
            layer: which layer of the model.
            kv: keys and values; None where a layer of the group "cross" only reads.
            mask_info: who may attend to whom, from `begin`; with keys and values of an encoder,
                `kv_segment_ids` say which of its positions are padding.
            ragged: the flat batch of a serving step, for pages.
            group: which memory of the layer, where it may have several; see `LayerCacheSpec`.
        """
        ...


class ContiguousCache(Cache, Protocol):
    """A cache of rows, made by `model.init_cache`: what a model calls around its layers."""

    @property
    def capacity(self) -> int | None:
        """Tokens that a row can have; None = any number."""
        ...

    def begin(self, segment_ids: Int[Array, "b s"]) -> tuple[Self, MaskInfo, Int[Array, "b s"]]:
        """Announce the tokens of a step.

        Padding may stand anywhere: it is not stored, and positions, windows and chunks do not count
        it.

        Args:
            segment_ids: nonzero for a token, 0 for padding.

        Returns:
            the cache to hand to the layers, who may attend to what in this step, and the rotary
            positions of the tokens.

        Raises:
            ValueError: a row gets more tokens than `capacity`. Inside jit their number is unknown:
                a step wider than `capacity` is refused, and a row that gets too many tokens over
                several steps gives NaN from then on.
        """
        ...

    def advance(self, count: int) -> Self:
        """End the step of `count` places that `begin` announced, after all layers have run.

        Raises:
            ValueError: no step of so many places has begun.
        """
        ...

    def select_rows(self, rows: Int[Array, " n"]) -> Self:
        """Rows of the cache between two steps, in this order; a row may come several times."""
        ...

    @property
    def tokens(self) -> Int[Array, " b"] | None:
        """Tokens of each row so far; None for pages."""
        ...

    @property
    def can_rewind(self) -> bool:
        """Whether `rewind` is possible: not for rings and states."""
        ...

    def rewind(self, tokens: Int[Array, " b"]) -> Self:
        """Forget all but the first `tokens` of each row, between two steps.

        Raises:
            ValueError: the cache keeps something that cannot be taken back.
        """
        ...


class StateCache(Protocol):
    """What a recurrent layer calls on a cache of rows or of state slots."""

    def get(
        self, layer: Layer, *, ragged: RaggedBatch | None = None, group: str = "recurrent"
    ) -> States:
        """The states of one layer before this step: of the rows, or of the sequences of `ragged`.

        A sequence that begins in this step gets zeros, whoever had its state slot before. One that
        was preempted and is computed again from its first token begins, too.
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
        """Store the states of one layer after this step, as `get` gave them.

        Raises:
            ValueError: the names are not those of the cache.
        """
        ...


def keys_values(kv: KeysValues | None, *, values_in_keys: bool) -> KeysValues:
    """This step's keys and values.

    Raises:
        ValueError: there are none.
    """
    if kv is None or (kv[1] is None and not values_in_keys):
        raise ValueError(
            f"a layer gave no {'keys and ' if kv is None else ''}values to a cache that stores "
            'each step\'s own; only layers of the group "cross" read what was written before, and '
            "only those with LayerCacheSpec(values_in_keys=True) have no values of their own"
        )
    return kv
