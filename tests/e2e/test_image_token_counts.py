"""Placeholder tokens of images equal their features, from the processor to the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_data.rows.example import RowImage
from ed_data.tokens.images import ImageEncoder
from ed_data.tokens.patches import PatchEncoder
from ed_esurge.core.commands import EncoderInput
from ed_esurge.encoder_items import PackedImages, TiledImages
from ed_models.body.image_rows import feature_counts, rounded_patches
from ed_models.body.unpadded import TileGrids

from tests.image_checkpoints import with_tokens
from tests.image_processors import PROCESSORS

pytest.importorskip("PIL.Image")

PATCH, MERGE = 14, 2
PIXELS = np.zeros((4000, 4000), np.uint8)


@pytest.fixture(scope="module")
def processor() -> Any:
    """The processor of Qwen2-VL with the sizes of the published checkpoints, without videos."""
    import transformers
    from ed_data import train_bpe

    class Processor(transformers.Qwen2VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    tokens = train_bpe(["a cat sat on a mat"] * 20, 270)
    tokens.add_special_tokens({"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>"]})
    return Processor(transformers.Qwen2VLImageProcessorPil(), tokens)


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_for_images_of_any_size(
    processor: Any, count: int
) -> None:
    """No pixel is computed: grids follow from sizes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    loader, limits = PatchEncoder(processor), processor.image_processor.size
    vision = SimpleNamespace(in_channels=3, temporal_patch_size=2, patch_size=PATCH)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision), merge=MERGE, encoded_features=8
    )
    engine, rng = PackedImages(model, 2**15), np.random.default_rng(0)
    compiled = {engine.count(arrays) for arrays in engine.examples()}
    numbers = 3 * 2 * PATCH**2
    for number, (height, width) in enumerate(np.exp(rng.uniform(3.0, 8.2, (count, 2))).astype(int)):
        edges = limits["shortest_edge"], limits["longest_edge"]
        size = smart_resize(int(height), int(width), PATCH * MERGE, *edges)
        grid = np.array([1, size[0] // PATCH, size[1] // PATCH], np.int32)
        features = int(feature_counts(grid, MERGE))
        sizes = [[int(height), int(width)]]
        (placeholders,) = processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens
        counted = loader.counts(RowImage(PIXELS[:height, :width], f"image {number}"))
        assert placeholders == counted.tokens == features and counted.patches == grid.prod()
        pixels = np.broadcast_to(np.float32(0), (grid.prod(), numbers))
        arrays = {"pixel_values": pixels, "image_grid_thw": grid}
        item = EncoderInput(b"", arrays, 3, placeholders)
        assert engine.check(item) is None and placeholders <= engine.longest
        positions = engine.positions(placeholders + 5, [item])
        assert positions is not None and positions.shape == (3, placeholders + 5)
        assert positions[0, -1] == 4 + max(grid[1:]) // MERGE
        assert rounded_patches(int(grid.prod()), MERGE) // MERGE**2 in compiled


GRID_PIXELS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_of_tiles_without_padding(count: int) -> None:
    """LLaVA-NeXT with the sizes of the published checkpoints; no pixel is computed."""
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_grid_pinpoints=GRID_PIXELS,
    )
    processor: Any = PROCESSORS["llava_next"](with_tokens)
    processor.image_processor = images
    grids = TileGrids.of(GRID_PIXELS, 336, PATCH)
    vision = SimpleNamespace(num_channels=3)
    text = SimpleNamespace(hidden_size=8)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, text_config=text))
    engine, loader = TiledImages(model, grids), ImageEncoder(processor)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(2.0, 8.2, (count, 2))).astype(int)
    counted = processor._get_num_multimodal_tokens(image_sizes=sizes.tolist()).num_image_tokens
    for number, (size, placeholders) in enumerate(zip(sizes, counted, strict=True)):
        tiles, features = grids.sizes(*size.tolist())
        assert placeholders == features <= engine.longest, size
        pixels = np.broadcast_to(np.float32(0), (tiles, 3, 336, 336))
        arrays = {"pixel_values": pixels, "image_sizes": size.astype(np.int32)}
        assert engine.check(EncoderInput(b"", arrays, 3, placeholders)) is None
        if number < 5:
            image = RowImage(np.zeros((*size, 3), np.uint8), f"image {number}")
            found = loader.tokens(image)
            assert (len(found.ids), found.tiles) == (placeholders, tiles)
