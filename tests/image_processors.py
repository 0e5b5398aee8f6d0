"""Tiny processors of vision-language families, which run without torchvision.

A processor is created from `with_tokens(image, *names, **special)`, which returns a tokenizer with
a special token for an image, with further special tokens, and with tokens that are attributes of
the tokenizer. Images have tiles of 28 x 28 pixels and four features; LLaVA-NeXT
omits features of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tokens = Callable[..., Any]
SIZE = {"height": 28, "width": 28}
#: Resolutions of images that are split into a grid of tiles.
GRIDS = [[28, 56], [56, 28], [56, 56]]


def gemma3(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    special = {"boi_token": "<start>", "image_token": "<soft>", "eoi_token": "<end>"}
    own = with_tokens("<start>", "<soft>", "<end>", **special)
    images = Gemma3ImageProcessorPil(size=SIZE)
    return transformers.Gemma3Processor(images, own, own.chat_template, image_seq_length=4)


def paligemma(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    own = with_tokens("<image>", image_token="<image>")
    images: Any = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = 4
    return transformers.PaliGemmaProcessor(images, own, own.chat_template)


def idefics3(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    names = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    own = with_tokens("<image>", *names)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return transformers.Idefics3Processor(images, own, 4, own.chat_template)


def internvl(with_tokens: Tokens) -> Any:
    import transformers

    special = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    own = with_tokens("<IMG>", *special.values(), context_image_token="<IMG>", **special)

    kind = without_videos(transformers.InternVLProcessor)
    return kind(tiles(), own, image_seq_length=4, chat_template=own.chat_template)


def aya_vision(with_tokens: Tokens) -> Any:
    import transformers

    names = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL"]
    own = with_tokens("<image>", *names)
    sizes: dict[str, Any] = {"patch_size": 14, "img_size": 28}
    return transformers.AyaVisionProcessor(tiles(), own, **sizes, chat_template=own.chat_template)


def cohere2_vision(with_tokens: Tokens) -> Any:
    """Return a processor whose tiles have one feature for each patch of 14 x 14 pixels."""
    from ed_models.checkpoints.cohere_processor import (
        Cohere2VisionImageProcessorPil,
        Cohere2VisionProcessor,
    )

    parts = ("boi", "eoi", "image", "img_line_break")
    special = {f"{part}_token": f"<|{part}|>" for part in parts}
    own = with_tokens("<|image|>", *special.values(), **special)
    images: Any = Cohere2VisionImageProcessorPil(size=SIZE, max_patches=4)
    images.patch_size = 2  # of features along the side of a tile
    return Cohere2VisionProcessor(images, own, own.chat_template)


def llava_next(with_tokens: Tokens) -> Any:
    import transformers

    return llava_grids(transformers.LlavaNextProcessor, with_tokens)


def llava_next_video(with_tokens: Tokens) -> Any:
    import transformers

    return llava_grids(without_videos(transformers.LlavaNextVideoProcessor), with_tokens)


def llava_grids(kind: Any, with_tokens: Tokens) -> Any:
    """Return a processor of a class of LLaVA-NeXT."""
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    own = with_tokens("<image>", "<video>", image_token="<image>", video_token="<video>")
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=SIZE, image_grid_pinpoints=GRIDS
    )
    options: dict[str, Any] = {
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "chat_template": own.chat_template,
    }
    return kind(image_processor=images, tokenizer=own, **options)


def vipllava(with_tokens: Tokens) -> Any:
    import transformers

    own = with_tokens("<image>", image_token="<image>")
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SIZE)
    options: dict[str, Any] = {"num_additional_image_tokens": 1, "patch_size": 14}
    options["vision_feature_select_strategy"] = "default"
    return transformers.LlavaProcessor(images, own, chat_template=own.chat_template, **options)


def llava_onevision(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    own = with_tokens("<image>", "<video>", image_token="<image>")
    images = LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=[[28, 28], *GRIDS])
    options: dict[str, Any] = {
        "num_image_tokens": 4,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_2",
    }
    kind = without_videos(transformers.LlavaOnevisionProcessor)
    return kind(images, own, chat_template=own.chat_template, **options)


def glm4v(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    own = with_tokens("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
    kind = without_videos(transformers.Glm4vProcessor)
    return kind(patches(Glm4vImageProcessorPil), own, chat_template=own.chat_template)


def qwen3_vl_moe(with_tokens: Tokens) -> Any:
    import transformers

    names = ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    own = with_tokens("<|image_pad|>", *names)
    images = patches(transformers.Qwen2VLImageProcessorPil)
    kind = without_videos(transformers.Qwen3VLProcessor)
    return kind(images, own, chat_template=own.chat_template)


def qwen_videos(with_tokens: Tokens, kind: str, **settings: object) -> Any:
    """Return a processor of images and videos, whose frames have at most 16 features."""
    import transformers
    from ed_models.checkpoints.video_processor import VIDEO_PROCESSORS

    names = ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    own = with_tokens("<|image_pad|>", *names)
    images = patches(transformers.Qwen2VLImageProcessorPil)
    processor = without_videos(getattr(transformers, kind))(
        images, own, chat_template=own.chat_template
    )
    size = {"shortest_edge": 64, "longest_edge": 1024}
    processor.video_processor = VIDEO_PROCESSORS[kind](patch_size=4, size=size, **settings)
    return processor


def qwen2_5_vl(with_tokens: Tokens) -> Any:
    return qwen_videos(with_tokens, "Qwen2_5_VLProcessor")


def qwen3_vl(with_tokens: Tokens) -> Any:
    return qwen_videos(with_tokens, "Qwen3VLProcessor")


def gemma4(with_tokens: Tokens) -> Any:
    """Return a processor whose images have at most 70 features of 8 x 8 pixels."""
    import transformers
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    names = [f"<|{name}|>" for name in ("image", "audio", "boi", "eoi", "boa", "eoa")]
    special = {f"{name.strip('<|>')}_token": name for name in names}
    own = with_tokens(*names, **special)
    sounds = transformers.Gemma4AudioFeatureExtractor()
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    kind = without_videos(transformers.Gemma4Processor)
    return kind(sounds, images, own, None, own.chat_template)


def mistral3(with_tokens: Tokens) -> Any:
    return rows_of_features(with_tokens, 2)


def llava(with_tokens: Tokens) -> Any:
    return rows_of_features(with_tokens, 1)


def rows_of_features(with_tokens: Tokens, merge: int) -> Any:
    """Return a processor of Pixtral, whose images have rows of features."""
    from ed_models.checkpoints.pixtral_processor import PixtralProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    own = with_tokens("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    side = {"height": 14, "width": 14}
    images = PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=side)
    template = own.chat_template
    return PixtralProcessor(images, own, 14, merge, chat_template=template)


def kimi_k25(with_tokens: Tokens) -> Any:
    from ed_models.checkpoints.kimi_processor import Kimi_K25ImageProcessorPil, Kimi_K25Processor

    own = with_tokens("<|media_pad|>")
    options: dict[str, Any] = {"patch_size": 4, "max_patches": 60}
    options["size"] = {"max_height": 8, "max_width": 8}
    images = Kimi_K25ImageProcessorPil(**options)
    return Kimi_K25Processor(images, own, own.chat_template)


def deepseek_vl(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
        DeepseekVLImageProcessorPil,
    )

    own = with_tokens("<image_placeholder>", image_token="<image_placeholder>")
    images = DeepseekVLImageProcessorPil(size=SIZE)
    return transformers.DeepseekVLProcessor(images, own, own.chat_template, num_image_tokens=4)


def glm46v(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    own = with_tokens("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
    kind = without_videos(transformers.Glm46VProcessor)
    return kind(patches(Glm46VImageProcessorPil), own, chat_template=own.chat_template)


def exaone4_5(with_tokens: Tokens) -> Any:
    import transformers

    own = with_tokens("<|image_pad|>", "<|video_pad|>")
    images = patches(transformers.Qwen2VLImageProcessorPil)
    kind = without_videos(transformers.Exaone4_5_Processor)
    return kind(images, own, chat_template=own.chat_template)


def lighton_ocr(with_tokens: Tokens) -> Any:
    import transformers
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    names = {f"image_{part}token": f"<|{part or 'image_'}|>" for part in ("", "break_", "end_")}
    own = with_tokens(*names.values(), **names)
    side = {"height": 28, "width": 28}
    images = PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=side)
    return transformers.LightOnOcrProcessor(images, own, 14, 2, own.chat_template)


def patches(kind: Any) -> Any:
    """Return an image processor whose images have at most 32 features of 8 x 8 pixels."""
    return kind(patch_size=4, size={"shortest_edge": 64, "longest_edge": 2048})


def without_videos(kind: Any) -> Any:
    """Return a class of processors without videos, which would need torchvision."""
    from ed_models.checkpoints import tokenizers

    return tokenizers.without_videos(kind)


def tiles() -> Any:
    """Return an image processor that splits an image into at most four tiles."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(size=SIZE, max_patches=4)


PROCESSORS: Mapping[str, Callable[[Tokens], Any]] = {
    "gemma3": gemma3,
    "paligemma": paligemma,
    "idefics3": idefics3,
    "internvl": internvl,
    "aya_vision": aya_vision,
    "cohere2_vision": cohere2_vision,
    "llava_next": llava_next,
    "llava_next_video": llava_next_video,
    "llava_onevision": llava_onevision,
    "vipllava": vipllava,
    "deepseek_vl": deepseek_vl,
}
#: Processors whose images become packed patches.
PATCHED: Mapping[str, Callable[[Tokens], Any]] = {
    "glm4v": glm4v,
    "glm4v_moe": glm4v,
    "glm46v": glm46v,
    "qwen3_vl_moe": qwen3_vl_moe,
    "kimi_k25": kimi_k25,
    "gemma4": gemma4,
    "exaone4_5": exaone4_5,
    "lighton_ocr": lighton_ocr,
}
#: Processors that also read videos.
VIDEOS: Mapping[str, Callable[[Tokens], Any]] = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
#: Processors that write a token after each row of features.
ROWS: Mapping[str, Callable[[Tokens], Any]] = {"mistral3": mistral3, "llava": llava}
