"""`Ctx`, the information about a batch that every layer receives, and the names of arrays.

Remat policies select intermediate values by name, and a mesh can fix their sharding
(`name_activation`). A family uses a name for one array of a layer, and never two names for the same
array. Otherwise a policy that excludes one name would keep the array under the other name.

| name | array |
| --- | --- |
| `layer_output` | the stream between two layers (`ed_layers.depth.stack` names it) |
| `normed_input` | the normed stream, the input of attention and MLP |
| `attn_query`, `attn_key`, `attn_value` | projections, split into heads, before rotary positions |
| `attn_qkv`, `attn_key_value` | the same, if one projection computes several of them |
| `attn_weights` | softmax of the scores, if they exist completely (`vanilla`) |
| `attn_output` | weighted sum of values, before the output projection |
| `attn_dense` | output of the output projection |
| `attn_receptance` | the receptance of RWKV |
| `residual` | the stream after attention |
| `mlp_gate`, `mlp_up`, `mlp_down` | projections of the MLP |
| `mlp_output` | output of the MLP; `mlp_down` of all chunks, if the MLP is scanned |
| `moe_router_logits`, `moe_gate_logits`, `moe_expert_output`, `moe_output` | of experts |
| `embeddings`, `model_output`, `lm_head_output` | outside of the layers: always kept |

Legend: b batch, s query length, r rotary dimension, n buckets, h heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_infra.sharding.placement import constrain
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from ed_layers.dropout import apply_dropout

if TYPE_CHECKING:
    from ed_infra.inputs import Encoded

    from ed_layers.cache.ragged import RaggedBatch
    from ed_layers.cache.storage import Layer

Mode = Literal["train", "prefill", "decode"]

#: `(cos, sin)` of the positions of a batch, each float32 [b, s, r / 2].
Rope = tuple[Float[Array, "b s half"], Float[Array, "b s half"]]
#: Name of the rotary tables of a model whose layers are all equal.
ALL_LAYERS = "default"

STREAM = ("batch", "sequence", "hidden")
_HEADS = ("batch", "query_sequence", "heads", "head_dim")
_KEY_HEADS = ("batch", "key_sequence", "kv_heads", "kv_head_dim")
_INNER = ("batch", "sequence", "mlp")

#: Logical axes (`ed_infra.sharding.axes.ACTIVATION_AXES`) of named arrays with a fixed sharding.
_AXES: dict[str, tuple[str | None, ...]] = {
    "attn_query": _HEADS,
    "attn_key": _KEY_HEADS,
    "attn_value": _KEY_HEADS,
    "attn_output": _HEADS,
    "mlp_gate": _INNER,
    "mlp_up": _INNER,
    **dict.fromkeys(
        (
            *("layer_output", "normed_input", "attn_dense", "residual"),
            *("mlp_down", "mlp_output", "embeddings", "model_output"),
        ),
        STREAM,
    ),
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("position_ids", "rope", "mask_info", "windows", "ragged", "adapter_ids", "key"),
        *("buckets", "summary_buckets", "encoded", "added", "routed_experts", "given_experts"),
    ],
    meta_fields=["layerdrop", "returns_experts", "mode", "config", "sums"],
)
@dataclass(frozen=True)
class Ctx:
    """The values that all layers share in one forward pass; a pytree, closed over by the scan.

    Attributes:
        position_ids: rotary positions, [b, s].
        rope: rotary tables by kind of layer, computed once: `ALL_LAYERS`, or the layer types of
            `rope_parameters` if each type has separate parameters.
        mask_info: the attention mask; None if `ragged` defines the mask.
        windows: the mask of layers that attend within windows of an image; None without them.
        ragged: the flat batch of a serving step; None otherwise.
        adapter_ids: LoRA adapter of each token, [b, s], or of each row, [b, 1]; 0 = none. None if
            no adapter is served.
        key: dropout key; None means deterministic.
        buckets: table of relative position buckets: biases [n, h] (T5), or embeddings [n, d]
            (DeBERTa); None without them.
        summary_buckets: the same table for summaries of blocks (LongT5); None without them.
        encoded: the encoder output that cross-attention reads; None if there is no encoder, or if
            the cache contains its keys and values.
        added: what the first l layers add to their outputs, [l, b, s, d]; None = nothing.
        routed_experts: experts of each token in each layer, [b, s, l, k], which replace the choice
            of the routers; -1 = the router chooses. None: routers choose.
        given_experts: `routed_experts` of one layer, [b, s, k]; set by `at_layer`.
        returns_experts: whether routers report their experts; static.
        layerdrop: probability that training skips a layer (Fan et al. 2019); static.
        mode: "train" (layers may be recomputed in a backward pass), "prefill" or "decode" (static).
        config: the model's configuration, for the sharding of activations (static).
        sums: sums of a step that kernels compute (static); None = no such kernel.
    """

    position_ids: Int[Array, "b s"]
    rope: Mapping[str, Rope]
    mask_info: MaskInfo | None = None
    windows: MaskInfo | None = None
    ragged: RaggedBatch | None = None
    adapter_ids: Int[Array, "b s"] | Int[Array, "b 1"] | None = None
    key: jax.Array | None = None
    buckets: Float[Array, "n _"] | None = None
    summary_buckets: Float[Array, "n h"] | None = None
    encoded: Encoded | None = None
    added: Float[Array, "l b s d"] | None = None
    routed_experts: Int[Array, "b s l k"] | None = None
    given_experts: Int[Array, "b s k"] | None = None
    returns_experts: bool = field(default=False)
    layerdrop: float = field(default=0.0)
    mode: Mode = field(default="train")
    config: EasyDeLBaseConfig | None = None
    sums: StreamAdditions | None = None

    def name_activation(self, x: Float[Array, "*dims"], name: str) -> jax.Array:
        """Name an intermediate value, for remat policies and for the mesh."""
        return self.rename(x, name_activation(x, name, self.config, self.mode))

    def rename(self, x: Float[Array, "*dims"], y: Float[Array, "*dims"]) -> jax.Array:
        """Return `y`, an array with the values of `x`."""
        return y if self.sums is None else self.sums.rename(x, y)

    def project_to_stream(
        self, layer: Callable[..., jax.Array], x: Float[Array, "*rows i"]
    ) -> jax.Array:
        """Return `layer(x, ctx)`, a result that is added to the stream."""
        return layer(x, self) if self.sums is None else self.sums.project(layer, x, self)

    def add_to_stream(self, x: Float[Array, "b s d"], y: Float[Array, "b s d"]) -> jax.Array:
        """Return `x + y`, the stream after the output of a layer."""
        return x + y if self.sums is None else self.sums.add(x, y)

    def normalize(
        self, norm: Callable[[jax.Array], jax.Array], x: Float[Array, "b s d"]
    ) -> jax.Array:
        """Return `norm(x)` of the stream."""
        return norm(x) if self.sums is None else self.sums.normalize(norm, x)

    def apply_dropout(self, x: Float[Array, "*dims"], rate: float, site: str) -> jax.Array:
        """Apply dropout in training; each `site` of a layer uses a separate random key."""
        if self.key is None or not rate:
            return x
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()))
        return apply_dropout(x, rate, key)

    def rows_dropped(self, x: Float[Array, "b s d"], rate: float, site: str) -> jax.Array:
        """Drop whole rows of an output in training (stochastic depth, Huang et al. 2016)."""
        if self.key is None or not rate:
            return x
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()))
        row_mask = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, 1))
        return jnp.where(row_mask, x / (1 - rate), 0).astype(x.dtype)

    def layer_dropped(self, x: Float[Array, "b s d"], out: Float[Array, "b s d"]) -> jax.Array:
        """Return the output of a layer, or its input x if training skips the layer."""
        if self.key is None or not self.layerdrop:
            return out
        key = jax.random.fold_in(self.key, zlib.crc32(b"layer"))
        return jnp.where(jax.random.bernoulli(key, self.layerdrop), x, out)

    def with_added(self, x: Float[Array, "b s d"], layer: Layer) -> Float[Array, "b s d"]:
        """Return the output of a layer plus what the layer adds to its output."""
        if self.added is None:
            return x
        count = self.added.shape[0]
        if isinstance(layer, int):
            return x + self.added[layer] if layer < count else x
        return x + jnp.where(layer < count, self.added[jnp.minimum(layer, count - 1)], 0)

    @property
    def real(self) -> Bool[Array, "b s"] | None:
        """Which positions hold tokens and not padding; None if the batch has no mask."""
        if self.ragged is not None:
            return self.ragged.real()[None]
        return None if self.mask_info is None else self.mask_info.q_segment_ids != 0

    def at_layer(self, layer: int | Int[Array, ""]) -> Ctx:
        """Return a context with the dropout key and the experts of one layer; equal for scanned
        and unrolled layers."""
        changes: dict[str, jax.Array] = {}
        if self.key is not None:
            changes["key"] = jax.random.fold_in(self.key, layer)
        if self.routed_experts is not None:
            changes["given_experts"] = self.routed_experts[:, :, layer]
        return replace(self, **changes) if changes else self


class StreamAdditions(Protocol):
    """Kernels that compute the additions to the stream (`ed_layers.stream_gpu`)."""

    def project(self, layer: Callable[..., jax.Array], x: jax.Array, ctx: Ctx) -> jax.Array:
        """Return `layer(x, ctx)`, a result that is added to the stream."""
        ...

    def rename(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return `y`, an array with the values of `x`."""
        ...

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return `x + y`, the stream after an addition."""
        ...

    def normalize(self, norm: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return `norm(x)` of the stream."""
        ...


def name_activation(
    x: Float[Array, "*dims"],
    name: str,
    config: EasyDeLBaseConfig | None = None,
    mode: Mode = "train",
) -> jax.Array:
    """Name an intermediate result of a layer.

    Args:
        x: any array.
        name: one of `gradient_checkpointing_targets`.
        config: configuration of the model. `use_sharding_constraint` constrains the sharding of the
            array to its `_AXES`; otherwise the compiler chooses the sharding inside a layer.
        mode: mode of the step; heads of attention have axes of their own in decoding.
    """
    if config is not None and config.use_sharding_constraint and name in _AXES:
        axes = _AXES[name]
        x = constrain(x, axes, config, mode if axes in (_HEADS, _KEY_HEADS) else "train")
    return checkpoint_name(x, name)
