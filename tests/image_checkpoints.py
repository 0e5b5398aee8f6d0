"""Tiny random checkpoints of vision-language families, with the processors of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ed_esurge.testing import byte_tokenizer
from ed_models.auto import AutoEasyDeLConfig, AutoEasyDeLModelForImageTextToText

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
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
SIZE = {"height": 28, "width": 28}


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


def gemma3() -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    special = {"boi_token": "<start>", "image_token": "<soft>", "eoi_token": "<end>"}
    own = with_tokens("<start>", "<soft>", "<end>", **special)
    images = Gemma3ImageProcessorPil(size=SIZE)
    fields = {"mm_tokens_per_image": 4, "image_token_index": own.convert_tokens_to_ids("<soft>")}
    text = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 20}
    processor = transformers.Gemma3Processor(images, own, own.chat_template, image_seq_length=4)
    return processor, {**fields, "text_config": text, "vision_config": SIGLIP}


def paligemma() -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    own = with_tokens("<image>", image_token="<image>")
    images: Any = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(images, own, own.chat_template)
    fields = {"image_token_index": own.convert_tokens_to_ids("<image>"), "projection_dim": 32}
    text = {"model_type": "gemma", "head_dim": 16}
    return processor, {**fields, "text_config": text, "vision_config": SIGLIP}


def idefics3() -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    names = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    own = with_tokens("<image>", *names)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    processor = transformers.Idefics3Processor(images, own, 4, own.chat_template)
    fields = {"image_token_id": own.convert_tokens_to_ids("<image>"), "scale_factor": 1}
    return processor, {**fields, "text_config": {"model_type": "llama"}, "vision_config": VISION}


FAMILIES = {"gemma3": gemma3, "paligemma": paligemma, "idefics3": idefics3}


def save_checkpoint(name: str, path: Path) -> Any:
    """Save a random model and its processor, and return the processor."""
    processor, fields = FAMILIES[name]()
    text = {**TEXT, **fields.pop("text_config"), "vocab_size": len(processor.tokenizer)}
    config = AutoEasyDeLConfig.for_model(
        name, text_config=text, sharding_axis_dims=(1, 1, 1, 1, 1), **fields
    )
    model: Any = AutoEasyDeLModelForImageTextToText.from_config(
        config, "float32", "float32", seed=5
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return processor
