"""Names and layouts of the checkpoints of Qwen's vision-language models.

A checkpoint has `visual.…` for the tower, `model.…` for the text, and `lm_head`. Models in memory
and some published checkpoints have `model.visual.…` and `model.language_model.…` instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from ed_models.body.vision import under
from ed_models.weights.rules import STANDARD, Rule, fused, permute, renamed

#: Name of the vision tower in the model.
TOWER = "model.visual"
TIED = {"lm_head.kernel": "model.language_model.embed_tokens.embedding"}
#: Other names of tensors in checkpoints -> the names that the rules have.
OTHER_NAMES = {"model.visual": "visual", "model.language_model": "model"}
_TEXT = {"model.language_model": "model", "model.visual": "visual"}
_TOWER = {
    TOWER: "visual",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.o_proj": "attn.proj",
    "self_attn": "attn",
    "patch_embed": "patch_embed.proj",
    "merger.linear_1": "merger.mlp.0",
    "merger.linear_2": "merger.mlp.2",
}


def patch_weights(names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of a vision-language model over packed patches.

    Args:
        names: further names of the tower: ours -> those of the checkpoint.
    """
    layers = *fused(("q_proj", "k_proj", "v_proj"), "qkv"), *STANDARD
    return (
        *renamed(
            {**names, **_TOWER},
            Rule(
                f"{TOWER}.patch_embed.kernel", f"{TOWER}.patch_embed.weight", permute(1, 2, 3, 4, 0)
            ),
            *(
                Rule(under(TOWER, rule.ours), f"{TOWER}.{rule.hf}", rule.layout)
                for rule in layers
                if rule.ours
            ),
        ),
        *renamed(_TEXT, *STANDARD),
    )
