"""Placeholder tokens of images equal their features, from the processor to the engine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_data.errors import DataError
from ed_data.rows.example import RowImage
from ed_data.tokens.images import ImageEncoder
from ed_data.tokens.patches import PatchEncoder, PlacedEncoder, RowEncoder
from ed_esurge.core.commands import EncoderInput
from ed_esurge.model import placed_items
from ed_models.body.image_rows import feature_counts, rounded_patches
from ed_models.body.packed_images import PatchForm, from_positions
from ed_models.body.unpadded import TileGrids
from ed_models.modalities.images import PackedImages, TiledImages

from tests.image_checkpoints import with_tokens
from tests.image_processors import PATCHED, PROCESSORS, ROWS

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
    form = PatchForm(PATCH, 3 * 2, MERGE, has_axes=True)
    engine, rng = PackedImages(form, 8, 2**15), np.random.default_rng(0)
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
    sizes[:2] = (582, 1165), (1165, 582)  # sizes whose exact grid is not that of `transformers`
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
            batch = loader.arrays({0: [image]}, 1, loader.width([[image]]))
            assert np.array_equal(batch["image_grids"], grids.best(batch["image_sizes"]))


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_of_reduced_grids(count: int) -> None:
    """LLaVA-OneVision with the sizes of the published checkpoints, for one and several images."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    processor: Any = PROCESSORS["llava_onevision"](with_tokens)
    processor.image_processor = images = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, "anyres_max_9"
    options: dict[str, Any] = {"limit": 9, "may_be_whole": True}
    grids = TileGrids.of(images.image_grid_pinpoints, 384, PATCH, **options)
    vision, text = SimpleNamespace(num_channels=3), SimpleNamespace(hidden_size=8)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, text_config=text))
    engine, rng = TiledImages(model, grids), np.random.default_rng(0)
    sizes = np.exp(rng.uniform(2.0, 8.2, (count, 2))).astype(int)
    counted = processor._get_num_multimodal_tokens(image_sizes=sizes.tolist()).num_image_tokens
    for size, placeholders in zip(sizes, counted, strict=True):
        several = processor.replace_image_token({"batch_num_images": [2]}, 0)
        for tokens, whole in ((placeholders, False), (several.count("<image>"), True)):
            tiles, features = grids.sizes(*size.tolist(), without_grid=whole)
            assert tokens == features <= engine.longest, size
            pixels = np.broadcast_to(np.float32(0), (tiles, 3, 384, 384))
            arrays = {"pixel_values": pixels, "image_sizes": size.astype(np.int32)}
            assert engine.check(EncoderInput(b"", arrays, 3, tokens)) is None


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_images_of_a_batch_become_items_of_the_engine(name: str) -> None:
    processor = PROCESSORS[name](with_tokens)
    loader, options = ImageEncoder(processor), dict[str, Any]()
    if name == "llava_onevision":
        options = {"limit": 2, "may_be_whole": True}
    grids = TileGrids.of(processor.image_processor.image_grid_pinpoints, 28, PATCH, **options)
    vision, text = SimpleNamespace(num_channels=3), SimpleNamespace(hidden_size=8)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, text_config=text))
    engine, sizes = TiledImages(model, grids), [(30, 90), (60, 20), (40, 44)]
    for own in (sizes[:1], sizes):
        images = [
            RowImage(np.zeros((*size, 3), np.uint8), "a row", is_single=len(own) == 1)
            for size in own
        ]
        ids = [token for image in images for token in (5, *loader.tokens(image).ids)]
        batch = loader.arrays({0: images}, 1, loader.width([images]))
        items = placed_items(engine, {n: x[0] for n, x in batch.items()}, ids, {loader.feature})
        assert [tuple(item.arrays["image_sizes"]) for item in items] == own
        assert not any(map(engine.check, items))
        grid = [engine.pad_item(item.arrays)["image_grids"] for item in items]
        assert np.array_equal(grid, batch["image_grids"][0, : len(own)])


def reference_of(processor: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the processor of `transformers` with the parts of a processor of this project.

    The module of `PixtralProcessor` imports torchvision for one function, which the module of the
    image processor for PIL has, too.
    """
    name = "transformers.models.pixtral"
    pil = importlib.import_module(f"{name}.image_processing_pil_pixtral")
    monkeypatch.setitem(sys.modules, f"{name}.image_processing_pixtral", pil)
    path = Path(str(pil.__file__)).parent / "processing_pixtral.py"
    spec = importlib.util.spec_from_file_location(f"{name}.processing_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.PixtralProcessor(
        processor.image_processor,
        processor.tokenizer,
        patch_size=processor.patch_size,
        spatial_merge_size=processor.spatial_merge_size,
    )


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_of_rows(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral 3 and Pixtral 12B with the sizes of the published checkpoints."""
    pytest.importorskip("torch")
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    processor: Any = ROWS[name](with_tokens)
    processor.patch_size = side = {"mistral3": 14, "llava": 16}[name]
    edge, merge = {"mistral3": 1540, "llava": 1024}[name], processor.spatial_merge_size
    processor.image_processor.size = {"longest_edge": edge}
    reference, loader = reference_of(processor, monkeypatch), RowEncoder(processor)
    form = PatchForm(side, 3, merge, ends_rows=True)
    engine, rng = PackedImages(form, 8, 2**15), np.random.default_rng(0)
    compiled = {engine.count(arrays) for arrays in engine.examples()}
    sizes = np.exp(rng.uniform(0.0, 8.2, (count, 2))).astype(int)
    counted = processor._get_num_multimodal_tokens(image_sizes=sizes.tolist()).num_image_tokens
    wanted = reference._get_num_multimodal_tokens(image_sizes=sizes[:300].tolist())
    assert counted[:300] == wanted.num_image_tokens
    for number, (size, tokens) in enumerate(zip(sizes, counted, strict=True)):
        blank = np.broadcast_to(np.uint8(0), (*size, 3))
        resized = get_resize_output_image_size(blank, edge, side * merge)
        grid = np.array([1, *(pixels // side for pixels in resized)], np.int32)
        features = int(feature_counts(grid, merge))
        image = RowImage(PIXELS[: size[0], : size[1]], f"image {number}")
        if not features:
            with pytest.raises(DataError, match="the other side has none"):
                loader.counts(image)
            continue
        assert loader.counts(image) == (features, grid.prod())
        assert loader.rows_and_columns(image) == tuple(grid[1:] // merge)
        gaps = form.gaps(grid)
        assert tokens == features + len(gaps) + 1, "an end token follows the last feature"
        assert rounded_patches(int(grid.prod()), merge) // merge**2 in compiled
        if number < 100:
            text = processor.replace_image_token({"image_sizes": [resized]}, 0)
            assert text == reference.replace_image_token({"image_sizes": [resized]}, 0)
            ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert loader.tokens(image).ids == ids
            places = [3 + place for place, token in enumerate(ids) if token == loader.feature]
            pixels = np.broadcast_to(np.float32(0), (grid.prod(), form.numbers))
            item = EncoderInput.at({"pixel_values": pixels, "image_grid_thw": grid}, places)
            assert engine.check(item) is None and item.gaps == gaps
            assert item.length <= engine.longest


@pytest.mark.parametrize("name", ROWS)
def test_processor_without_torchvision_returns_the_output_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    processor: Any = ROWS[name](with_tokens)
    reference = reference_of(processor, monkeypatch)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((30, 90), (1, 1), (70, 5))]
    text = "a [IMG] b [IMG][IMG] c"
    ours, theirs = (
        made(text=text, images=images, return_tensors="np") for made in (processor, reference)
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert np.array_equal(value, theirs[key]), key


@pytest.mark.daily("280-300")
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("budget", [280, 1120])
def test_placeholder_tokens_equal_features_of_placed_patches(count: int, budget: int) -> None:
    """Gemma 4 with the sizes of the published checkpoints; no pixel is computed."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    processor: Any = PATCHED["gemma4"](with_tokens)
    images = processor.image_processor
    images.patch_size, images.pooling_kernel_size = side, merge = 16, 3
    images.max_soft_tokens = budget
    loader, form = PlacedEncoder(processor), PatchForm(side, 3, merge, most=1120)
    engine, rng = PackedImages(form, 8, 2**15), np.random.default_rng(0)
    compiled = {engine.count(arrays) for arrays in engine.examples()}
    refused = 0
    for number, size in enumerate(np.exp(rng.uniform(0.0, 8.2, (count, 2))).astype(int).tolist()):
        image = RowImage(PIXELS[: size[0], : size[1]], f"image {number}")
        try:
            height, width = size
            resized = get_aspect_ratio_preserving_size(
                height, width, side, budget * merge**2, merge
            )
        except ValueError:
            refused += 1
            with pytest.raises(DataError, match="the processor refuses an image"):
                loader.counts(image)
            continue
        grid = np.array([1, *(pixels // side for pixels in resized)], np.int32)
        features = int(feature_counts(grid, merge))
        assert loader.counts(image) == (features, grid.prod())
        assert rounded_patches(int(grid.prod()), merge) // merge**2 in compiled
        if number < 100:
            ids = loader.tokens(image).ids
            assert ids.count(loader.feature) == features == len(ids) - 2
            places = [3 + place for place, token in enumerate(ids) if token == loader.feature]
            pixels = np.broadcast_to(np.float32(0), (grid.prod(), form.numbers))
            item = EncoderInput.at({"pixel_values": pixels, "image_grid_thw": grid}, places)
            assert engine.check(item) is None and features <= engine.longest
    assert refused < count / 50


def test_places_of_patches_become_grids_in_trainer_and_engine() -> None:
    processor: Any = PATCHED["gemma4"](with_tokens)
    loader, rng = PlacedEncoder(processor), np.random.default_rng(0)
    for size in ((30, 90), (1, 1), (70, 5), (33, 32)):
        output = loader.process_image(
            RowImage(rng.integers(0, 256, (*size, 3), np.uint8), "an image")
        )
        patches, grid = loader.pack_patches(output)
        theirs, (other,) = from_positions(output["pixel_values"], output["image_position_ids"], 2)
        assert np.array_equal(patches, theirs) and grid.tolist() == other.tolist()


def import_image_processor(model_type: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of an image processor of `transformers`, which imports torchvision.

    Only `resize` of the base class of the image processor uses torchvision.
    """
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        made = ModuleType(name)
        made.functional = ModuleType("functional")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, made)
    package = importlib.import_module(f"transformers.models.{model_type}")
    path = Path(str(package.__file__)).parent / f"image_processing_{model_type}.py"
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # transformers looks for its source
    spec.loader.exec_module(module)
    return module


def kimi_reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_image_processor("kimi_k25", monkeypatch).Kimi_K25ImageProcessor


@pytest.mark.torch
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_placeholder_tokens_equal_features_of_kimi(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi K2.5 with the sizes of the published checkpoints; no pixel is computed."""
    pytest.importorskip("torch")
    reference, processor = kimi_reference(monkeypatch), PATCHED["kimi_k25"](with_tokens)
    processor.image_processor = type(processor.image_processor)()
    loader, form = PatchEncoder(processor), PatchForm(PATCH, 3, MERGE)
    engine, rng = PackedImages(form, 8, 2**15), np.random.default_rng(0)
    compiled = {engine.count(arrays) for arrays in engine.examples()}
    for number, size in enumerate(np.exp(rng.uniform(0.0, 8.2, (count, 2))).astype(int).tolist()):
        image = RowImage(PIXELS[: size[0], : size[1]], f"image {number}")
        tokens, patches = loader.counts(image)
        wanted = reference.get_number_of_image_patches(reference, *size)
        assert patches == wanted == tokens * MERGE**2
        assert rounded_patches(patches, MERGE) // MERGE**2 in compiled
        assert tokens <= engine.longest


@pytest.mark.torch
def test_processor_of_kimi_returns_the_output_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    reference, processor = kimi_reference(monkeypatch), PATCHED["kimi_k25"](with_tokens)
    images, rng = processor.image_processor, np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (3, *size), np.uint8) for size in ((30, 41), (1, 1), (9, 80))]

    def resize(x: Any, size: Any, resample: Any) -> Any:
        return torch.stack([torch.tensor(images.resize(one.numpy(), size, resample)) for one in x])

    def pad(x: Any, pad_size: Any) -> Any:
        return torch.tensor(np.stack(images.pad(list(x.numpy()), pad_size)))

    def rescale_and_normalize(x: Any, *options: Any) -> Any:
        _, factor, _, mean, deviation = options
        return torch.tensor(
            np.stack(
                [
                    images.normalize(images.rescale(one, factor), mean, deviation)
                    for one in x.numpy()
                ]
            )
        )

    theirs = SimpleNamespace(
        resize=resize,
        pad=pad,
        rescale_and_normalize=rescale_and_normalize,
        patchify=partial(reference.patchify, None),
    )
    names = ("do_resize", "resample", "do_rescale", "do_normalize", "image_mean", "image_std")
    options = {name: getattr(images, name) for name in names}
    options |= {"patch_size": 4, "merge_size": 2, "max_patches": 60, "return_tensors": "pt"}
    size = SimpleNamespace(max_height=images.size["max_height"])
    wanted = reference._preprocess(
        theirs,
        [torch.tensor(image) for image in pixels],
        size=size,
        rescale_factor=1 / 255,
        disable_grouping=True,
        **options,
    )
    found = images(images=pixels, return_tensors="np")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.numpy(), atol=1e-6)
    (text,) = processor._process_images([pixels[0]], return_tensors="np")[1]
    assert text == "<|media_pad|>" * (int(wanted["image_grid_thw"][0].prod()) // 4)


@pytest.mark.torch
def test_tiles_of_command_a_vision_equal_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from transformers.image_utils import SizeDict

    reference = import_image_processor("cohere2_vision", monkeypatch)
    kind: Any = reference.Cohere2VisionImageProcessor
    images: Any = PROCESSORS["cohere2_vision"](with_tokens).image_processor
    published, rng = type(images)(), np.random.default_rng(0)
    for size in np.exp(rng.uniform(0.0, 8.2, (300, 2))).astype(int).tolist():
        wanted = kind.get_number_of_image_patches(published, *size)
        assert published.get_number_of_image_patches(*size) == wanted

    def resize(x: Any, size: Any, resample: Any) -> Any:
        return torch.stack([torch.tensor(images.resize(one.numpy(), size, resample)) for one in x])

    theirs, tile = SimpleNamespace(resize=resize), SizeDict(height=28, width=28)
    for size in ((30, 41), (1, 1), (9, 80), (200, 60)):
        pixels = rng.integers(0, 256, (3, *size), np.uint8)
        options: dict[str, Any] = {"patch_size": tile, "resample": images.resample}
        (wanted,) = kind.crop_image_to_patches(theirs, torch.tensor(pixels)[None], 1, 4, **options)
        assert np.array_equal(images.crop_image_to_patches(pixels, 1, 4, **options), wanted)


@pytest.mark.parametrize("name", ["cohere2_vision", "kimi_k25", "lighton_ocr"])
def test_saved_processor_is_loaded_without_torchvision(name: str, tmp_path: Path) -> None:
    from ed_models.checkpoints.tokenizers import load_processor

    made: Any = {**PROCESSORS, **PATCHED}[name](with_tokens)
    made.save_pretrained(tmp_path)
    vision = {"model_type": "pixtral"} if name == "lighton_ocr" else {}
    config = {"model_type": name, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read: Any = load_processor(str(tmp_path))
    assert read.image_processor.to_dict() == made.image_processor.to_dict()
    assert read.chat_template == made.chat_template
    pixels = np.zeros((30, 20, 3), np.uint8)
    text = f"a {made.image_token} b"
    options: dict[str, Any] = {"padding": False, "return_tensors": "np"}
    ours, theirs = (one(text=text, images=[pixels], **options) for one in (made, read))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
