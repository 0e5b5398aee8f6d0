"""Tiny multimodal models of transformers whose language model this project loads."""

from __future__ import annotations

from typing import Any, NamedTuple

from ed_infra.testing import require_torch

from tests.conformance import cases

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model"}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16}
LLAMA4_TOWER = {
    **TOWER,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
SAM_TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "mlp_dim": 32,
    "output_channels": 16,
    "window_size": 2,
    "global_attn_indexes": [0],
}
KIMI_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
GEMMA4_TOWER = {**KIMI_TOWER, "num_key_value_heads": 2, "head_dim": 16}


class Multimodal(NamedTuple):
    """A tiny multimodal model: its language model is a case of the conformance suite."""

    model_type: str
    text_type: str
    row: str
    vision: dict[str, Any] | None

    def __str__(self) -> str:
        return f"{self.model_type}: {self.text_type}, {self.row}"


GEMMA3 = Multimodal("gemma3", "gemma3_text", "both kinds of layers", SIGLIP)
GEMMA4 = Multimodal("gemma4", "gemma4_text", "shared keys, inputs of layers", GEMMA4_TOWER)
GEMMA4_WITHOUT_TOWER = Multimodal("gemma4", "gemma4_text", "experts, values that are keys", None)
MISTRAL3 = Multimodal("mistral3", "mistral", "window", PIXTRAL)
QWEN3_5 = Multimodal("qwen3_5", "qwen3_5_text", "sections, biases, tied", QWEN_TOWER)
QWEN3_5_MOE = Multimodal("qwen3_5_moe", "qwen3_5_moe_text", "two of four, biases", QWEN_TOWER)
#: Models that every run tests; the others are nightly.
MODELS = (GEMMA3, MISTRAL3)
OTHER_MODELS = (
    GEMMA4,
    QWEN3_5,
    QWEN3_5_MOE,
    Multimodal("deepseek_vl", "llama", "tied", SIGLIP),
    Multimodal("exaone4_5", "exaone4", "windows", QWEN_TOWER),
    GEMMA4_WITHOUT_TOWER,
    Multimodal("got_ocr2", "qwen2", "biases", SAM_TOWER),
    Multimodal("idefics3", "llama", "tied", TOWER),
    Multimodal("internvl", "qwen2", "biases", {**TOWER, "image_size": [28, 28]}),
    Multimodal("kimi_k25", "deepseek_v3", "groups, yarn", KIMI_TOWER),
    Multimodal("lfm2_vl", "lfm2", "adjusted size", {**TOWER, "model_type": "siglip2_vision_model"}),
    Multimodal("lighton_ocr", "qwen3", "own head size, biases", PIXTRAL),
    Multimodal("llama4", "llama4_text", "dense layers, two experts", LLAMA4_TOWER),
    Multimodal("mistral3", "ministral3", "yarn, scaled queries", PIXTRAL),
    Multimodal("smolvlm", "llama", "biases, llama3 rope", TOWER),
)


def torch_model(model: Multimodal, kind: str = "AutoModelForImageTextToText", **fields: Any) -> Any:
    """Return a multimodal model of transformers with random weights."""
    torch = require_torch()
    import transformers

    text = cases.fields(model.text_type, model.row)
    config_class: Any = transformers.CONFIG_MAPPING[model.model_type]
    config = config_class(
        text_config={**text, "model_type": model.text_type, "initializer_range": 0.2},
        vision_config=model.vision,
        **{"tie_word_embeddings": text["tie_word_embeddings"], **fields},
    )
    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(config).float().eval()
