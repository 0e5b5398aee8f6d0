"""Models of images: the processors of new models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

#: Model type of a vision tower -> its image processor in `transformers`; default: ViT's.
_PROCESSORS = {
    "clip_vision_model": "CLIPImageProcessorPil",
    "siglip_vision_model": "SiglipImageProcessorPil",
}
#: Model type -> its processor of images and texts.
_WITH_TEXT = {"clip": "CLIPProcessor", "siglip": "SiglipProcessor"}


def new_processor(
    config: EasyDeLBaseConfig, tokenizer: PreTrainedTokenizerBase | None
) -> ProcessorMixin:
    """Return the processor of a new model.

    The image processor resizes images to `image_size`, and normalizes them with the mean and the
    deviation of its class.

    Args:
        config: The configuration of the model.
        tokenizer: The tokenizer; None for a model without text, whose image processor is returned.

    Raises:
        ConfigError: New models of the model type have no processor.
    """
    import transformers

    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    name = _PROCESSORS.get(vision.model_type, "ViTImageProcessorPil")
    sizes: dict[str, Any] = {"size": {"height": height, "width": width}}
    if name == "CLIPImageProcessorPil":
        sizes["do_center_crop"] = False
    images = getattr(transformers, name)(**sizes)
    if tokenizer is None:
        return images
    if config.model_type not in _WITH_TEXT:
        model_types = ", ".join(_WITH_TEXT)
        raise ConfigError(
            f"a new model of type {config.model_type!r} has no processor of images and texts, only "
            f"{model_types} have: set model.tokenizer to a directory with a processor"
        )
    kind = getattr(transformers, _WITH_TEXT[config.model_type])
    return kind(image_processor=images, tokenizer=tokenizer)
