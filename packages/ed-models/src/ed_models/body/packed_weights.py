"""Names and layouts of the tower of Pixtral, alone and inside vision-language models."""

from __future__ import annotations

from ed_models.body.tiles import TILED_WEIGHTS
from ed_models.body.vision import tower_rules
from ed_models.weights.rules import Rule, equal, permute, renamed, transpose

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
