"""Names and layouts of checkpoints with a tower over packed patches: Qwen's and Pixtral's.

A checkpoint of Qwen has `visual.…` for the tower, `model.…` for the text, and `lm_head`. Models in
memory and some published checkpoints have `model.visual.…` and `model.language_model.…` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ed_models.adapters.peft_layout import Modules
from ed_models.body.tiles import TILED_WEIGHTS
from ed_models.body.vision import tower_rules, under
from ed_models.weights.rules import STANDARD, Rule, equal, fused, permute, renamed, transpose

#: Name of the vision tower in the model.
TOWER = "model.visual"
#: Other names of tensors in checkpoints -> the names that the rules have.
PATCH_NAMES = {
    "model.visual": "visual",
    "model.language_model": "model",
    "language_model": "model",  # of a body that was saved alone
}
#: Names of checkpoints -> names of the modules of transformers 5.
PATCH_MODULES = Modules({"model": "model.language_model", "visual": "model.visual"})
#: Our names of text and tower -> those of checkpoints of Qwen2-VL and Qwen2.5-VL.
_STORED = {"model.language_model": "model", TOWER: "visual"}
_TOWER = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "attn.proj",
    "self_attn": "attn",
    "patch_embed": "patch_embed.proj",
}
#: Text and tower have our names in checkpoints of Qwen3-VL; parts of its tower have other names.
NESTED: Mapping[str, str] = {}
NESTED_NAMES = {
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "linear_1": "linear_fc1",
    "linear_2": "linear_fc2",
    "pos_embed": "pos_embed.weight",
}
#: Names of the merger of Qwen2-VL and Qwen2.5-VL.
MERGER = {
    "merger.norm": "merger.ln_q",
    "merger.linear_1": "merger.mlp.0",
    "merger.linear_2": "merger.mlp.2",
}


def patch_weights(
    names: Mapping[str, str],
    *,
    text: Sequence[Rule] = STANDARD,
    stored: Mapping[str, str] = _STORED,
) -> tuple[Rule, ...]:
    """Return the rules of a vision-language model over packed patches.

    Args:
        names: further names of the tower: ours -> those of the checkpoint.
        text: rules of the language model.
        stored: names of text and tower in checkpoints.
    """
    layers = *fused(("q_proj", "k_proj", "v_proj"), "qkv"), *STANDARD
    return (
        *renamed(
            {**names, **_TOWER, **stored},
            Rule(
                f"{TOWER}.patch_embed.kernel", f"{TOWER}.patch_embed.weight", permute(1, 2, 3, 4, 0)
            ),
            *(
                Rule(under(TOWER, rule.ours), f"{TOWER}.{rule.hf}", rule.layout)
                for rule in layers
                if rule.ours
            ),
        ),
        *renamed(stored, *text),
    )


# The tower of Pixtral, alone and inside vision-language models.


_NAMES = {
    "patch_embed": "patch_conv",
    "patch_norm": "ln_pre",
    "blocks": "transformer.layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "feed_forward",
}
_RULES = (
    Rule("patch_embed.kernel", "patch_embed.weight", permute(1, 2, 3, 0)),
    Rule("patch_norm.weight", "patch_norm.weight", equal),
    Rule("blocks.{path}.kernel", "blocks.{path}.weight", transpose),
    Rule("blocks.{path}.weight", "blocks.{path}.weight", equal),
)
#: Rules of the tower alone.
PIXTRAL = renamed(_NAMES, *_RULES)
#: Rules of models with this tower, or a tower with the names of CLIP.
PACKED_WEIGHTS = (
    *tower_rules("model.vision_tower", "vision_tower", _NAMES, _RULES),
    *TILED_WEIGHTS,
)
