"""`Ctx`: the information about a batch that every layer receives besides the activations.

Legend: b batch, s query length, r rotary dimension, n buckets, h heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import Encoded
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from ed_layers.cache.ragged import RaggedBatch
from ed_layers.named import named

Mode = Literal["train", "prefill", "decode"]

#: `(cos, sin)` of the positions of a batch, each float32 [b, s, r / 2].
Rope = tuple[Float[Array, "b s half"], Float[Array, "b s half"]]
#: Name of the rotary tables of a model whose layers are all equal.
ALL_LAYERS = "default"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("position_ids", "rope", "mask_info", "ragged", "adapter_ids", "key"),
        *("buckets", "encoded"),
    ],
    meta_fields=["mode", "config"],
)
@dataclass(frozen=True)
class Ctx:
    """The values that all layers share in one forward pass; a pytree, closed over by the scan.

    Attributes:
        position_ids: rotary positions, [b, s].
        rope: rotary tables by kind of layer, computed once: `ALL_LAYERS`, or the layer types of
            `rope_parameters` if each type has separate parameters.
        mask_info: the attention mask; None if `ragged` defines the mask.
        ragged: the flat batch of a serving step; None otherwise.
        adapter_ids: LoRA adapter of each token, [b, s], or of each row, [b, 1]; 0 = none. None if
            no adapter is served.
        key: dropout key; None means deterministic.
        buckets: trained bias of relative position buckets, [n, h] (T5); None without them.
        encoded: the encoder output that cross-attention reads; None if there is no encoder, or if
            the cache contains its keys and values.
        mode: "train" (layers may be recomputed in a backward pass), "prefill" or "decode" (static).
        config: the model's configuration, for the sharding of activations (static).
    """

    position_ids: Int[Array, "b s"]
    rope: Mapping[str, Rope]
    mask_info: MaskInfo | None = None
    ragged: RaggedBatch | None = None
    adapter_ids: Int[Array, "b s"] | Int[Array, "b 1"] | None = None
    key: jax.Array | None = None
    buckets: Float[Array, "n h"] | None = None
    encoded: Encoded | None = None
    mode: Mode = field(default="train")
    config: EasyDeLBaseConfig | None = None

    def named(self, x: Float[Array, "*dims"], name: str) -> jax.Array:
        """Name an intermediate value, for remat policies and for the mesh."""
        return named(x, name, self.config)

    def dropped(self, x: Float[Array, "*dims"], rate: float, site: str) -> jax.Array:
        """Apply dropout in training; each `site` of a layer uses a separate random key."""
        if self.key is None or not rate:
            return x
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()))
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)

    @property
    def real(self) -> Bool[Array, "b s"] | None:
        """Which positions hold tokens and not padding; None if the batch has no mask."""
        if self.ragged is not None:
            return self.ragged.real()[None]
        return None if self.mask_info is None else self.mask_info.q_segment_ids != 0

    def at_layer(self, layer: int | Int[Array, ""]) -> Ctx:
        """Return a context with the dropout key of one layer; equal for scanned and unrolled."""
        if self.key is None:
            return self
        return replace(self, key=jax.random.fold_in(self.key, layer))
