"""Named intermediate values: remat policies select them, and a mesh can fix their sharding.

A family uses a name for one array of a layer, and never two names for the same array. Otherwise a
policy that excludes one name would keep the array under the other name.

| name | array |
| --- | --- |
| `layer_output` | the stream between two layers (`ed_layers.depth.stack` names it) |
| `normed_input` | what attention and MLP read: the normed stream |
| `attn_query`, `attn_key`, `attn_value` | projections, split into heads, before rotary positions |
| `attn_qkv`, `attn_key_value` | the same where one projection makes several |
| `attn_weights` | softmax of the scores, where they exist as a whole (`vanilla`) |
| `attn_output` | weighted sum of values, before the output projection |
| `attn_dense` | its output projection |
| `attn_receptance` | the receptance of RWKV |
| `residual` | the stream after attention |
| `mlp_gate`, `mlp_up`, `mlp_down` | projections of the MLP |
| `mlp_output` | what the MLP adds to the stream; `mlp_down` of all chunks, where it is scanned |
| `moe_router_logits`, `moe_gate_logits`, `moe_expert_output`, `moe_output` | of experts |
| `embeddings`, `model_output`, `lm_head_output` | outside of the layers, where all is kept |
"""

from __future__ import annotations

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding.placement import constrain
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

STREAM = ("batch", "sequence", "hidden")
_HEADS = ("batch", "sequence", "heads", None)
_KEY_HEADS = ("batch", "sequence", "kv_heads", None)
_INNER = ("batch", "sequence", "mlp")

#: Logical axes (`ed_infra.sharding.axes.ACTIVATION_AXES`) of named arrays with a fixed sharding.
AXES: dict[str, tuple[str | None, ...]] = {
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


def named(x: Float[Array, "*dims"], name: str, config: EasyDeLBaseConfig | None = None) -> Array:
    """Name an intermediate result of a layer.

    Args:
        x: any array.
        name: one of `gradient_checkpointing_targets`.
        config: the model's. `use_sharding_constraint` constrains the sharding of the array to its
            `AXES`; without that field the compiler chooses the sharding inside a layer.
    """
    if config is not None and config.use_sharding_constraint and name in AXES:
        x = constrain(x, AXES[name], config)
    return checkpoint_name(x, name)
