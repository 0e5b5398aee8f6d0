"""Tiny random checkpoints of vision-language families, with the processors of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ed_esurge.testing import byte_tokenizer
from ed_models.auto import AutoEasyDeLConfig, AutoEasyDeLModelForImageTextToText

from tests.image_processors import GRIDS, PATCHED, PROCESSORS, ROWS, VIDEOS

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}<|video_pad|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|assistant|>"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.3,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}


def with_tokens(image: str, *names: str, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokens = byte_tokenizer(TEMPLATE.replace("IMAGE", image))
    tokens.add_special_tokens({"additional_special_tokens": [image, *names]})
    # Tokens with names are attributes of the tokenizer, also after it is loaded.
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokens._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=special,
    )
    made.chat_template = tokens.chat_template
    return made


def gemma3(own: Any) -> dict[str, Any]:
    text = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 20}
    fields = {"mm_tokens_per_image": 4, "image_token_index": own.convert_tokens_to_ids("<soft>")}
    return {**fields, "text_config": text, "vision_config": SIGLIP}


def paligemma(own: Any) -> dict[str, Any]:
    text = {"model_type": "gemma", "head_dim": 16}
    fields = {"image_token_index": own.convert_tokens_to_ids("<image>"), "projection_dim": 32}
    return {**fields, "text_config": text, "vision_config": SIGLIP}


def idefics3(own: Any) -> dict[str, Any]:
    fields = {"image_token_id": own.convert_tokens_to_ids("<image>"), "scale_factor": 1}
    return {**fields, "text_config": {"model_type": "llama"}, "vision_config": VISION}


def internvl(own: Any) -> dict[str, Any]:
    fields = {"image_token_id": own.convert_tokens_to_ids("<IMG>"), "downsample_ratio": 1.0}
    return {**fields, "text_config": {"model_type": "qwen2"}, "vision_config": VISION}


def aya_vision(own: Any) -> dict[str, Any]:
    token = own.convert_tokens_to_ids("<|IMG_PATCH|>")
    fields = {"image_token_index": token, "downsample_factor": 1}
    text = {"model_type": "cohere2", "sliding_window": 20}
    return {**fields, "text_config": text, "vision_config": SIGLIP}


def llava_next(own: Any) -> dict[str, Any]:
    fields = {"image_token_index": own.convert_tokens_to_ids("<image>")}
    vision = {**VISION, "model_type": "clip_vision_model"}
    grids = {"image_grid_pinpoints": GRIDS}
    return {**fields, **grids, "text_config": {"model_type": "llama"}, "vision_config": vision}


def llava_onevision(own: Any) -> dict[str, Any]:
    fields = {"image_token_index": own.convert_tokens_to_ids("<image>")}
    grids = {"image_grid_pinpoints": [[28, 28], *GRIDS], "vision_aspect_ratio": "anyres_max_2"}
    vision = {**SIGLIP, "vision_use_head": False}
    return {**fields, **grids, "text_config": {"model_type": "qwen2"}, "vision_config": vision}


PATCHES = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_heads": 3,
    "patch_size": 4,
    "initializer_range": 0.3,
}


def glm4v(own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    fields = {"image_token_id": own.convert_tokens_to_ids("<|image|>")}
    vision = {**PATCHES, "image_size": 20}
    return {**fields, "text_config": {"rope_parameters": rope}, "vision_config": vision}


def qwen3_vl_moe(own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    fields = {"image_token_id": own.convert_tokens_to_ids("<|image_pad|>")}
    text = {"rope_parameters": rope, "head_dim": 8, **experts}
    vision = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return {**fields, "text_config": text, "vision_config": vision}


def qwen2_5_vl(own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {**PATCHES, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    return {**qwen_tokens(own), "text_config": {"rope_parameters": rope}, "vision_config": vision}


def qwen3_vl(own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"rope_parameters": rope, "head_dim": 8}
    vision = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return {**qwen_tokens(own), "text_config": text, "vision_config": vision}


def qwen_tokens(own: Any) -> dict[str, Any]:
    """Return the ids of the tokens of images and videos."""
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: own.convert_tokens_to_ids(name) for field, name in names.items()}


def kimi_k25(own: Any) -> dict[str, Any]:
    text = {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_group": 1,
        "topk_group": 1,
    }
    vision = {
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 40,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
    }
    fields = {"image_token_id": own.convert_tokens_to_ids("<|media_pad|>")}
    fields |= {"projection_hidden_size": 24, "tie_word_embeddings": False}
    return {**fields, "text_config": text, "vision_config": vision}


def gemma4(own: Any) -> dict[str, Any]:
    text = {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "head_dim": 8,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": len(own),
        "hidden_size_per_layer_input": 8,
        "use_bidirectional_attention": "vision",
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 300,
        "initializer_range": 0.3,
    }
    fields = {"image_token_id": own.convert_tokens_to_ids("<|image|>")}
    fields |= {"tie_word_embeddings": False}
    return {**fields, "text_config": text, "vision_config": vision}


PIXTRAL = {**VISION, "model_type": "pixtral"}


def mistral3(own: Any) -> dict[str, Any]:
    text = {"model_type": "mistral", "sliding_window": None}
    fields = {"image_token_index": own.convert_tokens_to_ids("[IMG]"), "spatial_merge_size": 2}
    return {**fields, "text_config": text, "vision_config": PIXTRAL, "tie_word_embeddings": False}


def llava(own: Any) -> dict[str, Any]:
    """Return the fields of Pixtral 12B."""
    text = {"model_type": "mistral", "sliding_window": None}
    fields = {"image_token_index": own.convert_tokens_to_ids("[IMG]"), "vision_feature_layer": -1}
    fields |= {"vision_feature_select_strategy": "full"}
    return {**fields, "text_config": text, "vision_config": PIXTRAL}


def lighton_ocr(own: Any) -> dict[str, Any]:
    fields = {"image_token_id": own.image_token_id, "tie_word_embeddings": False}
    text = {"model_type": "qwen3", "head_dim": 8}
    return {**fields, "text_config": text, "vision_config": PIXTRAL}


#: Model type -> fields of the configuration, from the tokenizer.
FAMILIES = {
    "gemma3": gemma3,
    "paligemma": paligemma,
    "idefics3": idefics3,
    "internvl": internvl,
    "aya_vision": aya_vision,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "glm4v": glm4v,
    "qwen3_vl_moe": qwen3_vl_moe,
    "mistral3": mistral3,
    "llava": llava,
    "lighton_ocr": lighton_ocr,
    "kimi_k25": kimi_k25,
    "gemma4": gemma4,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}


def save_checkpoint(name: str, path: Path, seed: int = 5) -> Any:
    """Save a random model and its processor, and return the processor."""
    processor = {**PROCESSORS, **PATCHED, **ROWS, **VIDEOS}[name](with_tokens)
    fields = FAMILIES[name](processor.tokenizer)
    text = {**TEXT, **fields.pop("text_config"), "vocab_size": len(processor.tokenizer)}
    config = AutoEasyDeLConfig.for_model(
        name, text_config=text, sharding_axis_dims=(1, 1, 1, 1, 1), **fields
    )
    model: Any = AutoEasyDeLModelForImageTextToText.from_config(
        config, "float32", "float32", seed=seed
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return processor
