"""Chats with images of different sizes: placeholder tokens, packed patches and their grids."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.rows.example import RowImage
from ed_data.tokens.patches import PatchEncoder, PlacedEncoder, RowEncoder

from tests.image_processors import PATCHED

Image = pytest.importorskip("PIL.Image")

TOKENS = ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
SIZES = [(30, 40), (8, 8), (50, 20), (20, 21), (64, 9), (33, 33)]
NUMBERS = 3 * 2 * 4 * 4


@pytest.fixture(scope="module")
def processor(tokenizer):
    """A Qwen2-VL processor without videos, which would need torchvision."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    class Processor(Qwen2VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    own = pickle.loads(pickle.dumps(tokenizer))
    own.add_special_tokens({"additional_special_tokens": TOKENS})
    own.chat_template = TEMPLATE
    size = {"shortest_edge": 64, "longest_edge": 2048}
    images = Qwen2VLImageProcessorPil(patch_size=4, size=size)
    return Processor(images, own, TEMPLATE)


@pytest.fixture
def pictures(tmp_path):
    """Files `0.png` to `5.png` of different sizes."""
    for i, size in enumerate(SIZES):
        Image.new("RGB", size, (30 * i, 200 - 30 * i, 3)).save(tmp_path / f"{i}.png")
    return tmp_path


def chat(number: int, images: int) -> dict:
    parts = [*[{"type": "image"}] * images, {"type": "text", "text": f"question {number}?"}]
    names = [f"{(number + i) % len(SIZES)}.png" for i in range(images)]
    answer = {"role": "assistant", "content": f"answer {number}"}
    return {"messages": [{"role": "user", "content": parts}, answer], "images": names}


def loader_of(mixture, jsonl, processor, rows, **options):
    inform = {"data_files": jsonl(rows), "content_field": "messages", **options.pop("inform", {})}
    made = mixture(informs=[inform], **{"pack_tokens": False, "seed": 0, **options})
    size = None if made.pack_tokens else 160
    return build_loader(made, batch_size=2, seq_length=size, shuffle=False, processor=processor)


def processed(processor, files):
    images = [Image.open(file).convert("RGB") for file in files]
    return processor.image_processor(images=images, return_tensors="np")


@pytest.mark.parametrize("how", [{}, {"streaming": True}, {"pack_tokens": True}])
def test_batch_contains_the_patches_of_the_processor(mixture, jsonl, processor, pictures, how):
    rows = [chat(i, (3, 0, 1, 2)[i % 4]) for i in range(8)]
    packing = {"pack_seq_length": 256, "pack_shuffle": False} if "pack_tokens" in how else {}
    batch = next(loader_of(mixture, jsonl, processor, rows, **how, **packing))
    pixels, grids = batch["pixel_values"], batch["image_grid_thw"]
    assert pixels.dtype == np.float32 and grids.dtype == np.int32
    assert pixels.shape[::2] == (2, NUMBERS) and grids.shape[::2] == (2, 3)
    for size in (pixels.shape[1] // 4, grids.shape[1]):
        assert size & (size - 1) == 0, "sizes are powers of two"
    for row, segments in enumerate(batch["segment_ids"]):
        ids, files = batch["input_ids"][row], []
        for segment in range(1, segments.max() + 1):
            text = processor.tokenizer.decode(ids[segments == segment])
            source = rows[int(text.split("question ")[1].split("?")[0])]
            files += [pictures / name for name in source["images"]]
        placeholders = ids == processor.image_token_id
        assert (batch["labels"][row][placeholders] == -100).all()
        assert not grids[row, len(files) :].any()
        count = int(grids[row].prod(axis=1).sum())
        assert placeholders.sum() == count // 4
        assert not pixels[row, count:].any()
        if files:
            expected = processed(processor, files)
            assert np.array_equal(pixels[row, :count], expected["pixel_values"])
            assert np.array_equal(grids[row, : len(files)], expected["image_grid_thw"])


def test_hosts_create_patches_of_equal_shape(mixture, jsonl, processor, pictures):
    loader = loader_of(mixture, jsonl, processor, [chat(0, 3), chat(1, 0)])
    whole = loader.batch_at(0)
    parts = [loader.for_rows([row]).batch_at(0) for row in range(2)]
    for name in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_image_that_the_processor_refuses_names_file_and_row(mixture, jsonl, processor, pictures):
    Image.new("RGB", (1000, 2)).save(pictures / "thin.png")
    row = {**chat(0, 1), "images": ["thin.png"]}
    with pytest.raises(DataError, match=r"data\.jsonl:1.*refuses an image of 1000 x 2 pixels"):
        loader_of(mixture, jsonl, processor, [row])


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_counted_tokens_equal_features_of_images_of_any_size(processor, count):
    """The grid of an image follows from its size: no pixel is computed."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    encoder, rng = PatchEncoder(processor), np.random.default_rng(0)
    images, pixels = processor.image_processor, np.zeros((300, 300), np.uint8)
    for number in range(count):
        height, width = (int(side) for side in rng.integers(2, 300, 2))
        counts = encoder.counts(RowImage(pixels[:height, :width], f"image {number}"))
        factor = images.patch_size * images.merge_size
        limits = images.size["shortest_edge"], images.size["longest_edge"]
        rows, columns = (
            side // images.patch_size for side in smart_resize(height, width, factor, *limits)
        )
        assert counts == (rows * columns // images.merge_size**2, rows * columns)
        if number < 20:
            output = images(images=[np.zeros((height, width, 3), np.uint8)], return_tensors="np")
            assert output["image_grid_thw"].tolist() == [[1, rows, columns]]


@pytest.mark.parametrize("family", PATCHED)
def test_counts_of_other_families_equal_the_output_of_their_processors(family, tokenizer):
    def with_tokens(image, *names, **special):
        own = pickle.loads(pickle.dumps(tokenizer))
        own.add_special_tokens({"additional_special_tokens": [image, *names]})
        for name, token in special.items():
            setattr(own, name, token)
            setattr(own, f"{name}_id", own.convert_tokens_to_ids(token))
        own.chat_template = TEMPLATE.replace("<|image_pad|>", image)
        return own

    made = PATCHED[family](with_tokens)
    kind = next(kind for kind in (RowEncoder, PlacedEncoder, PatchEncoder) if kind.fits(made))
    encoder, rng = kind(made), np.random.default_rng(0)
    for number in range(30):
        height, width = (int(side) for side in rng.integers(4, 200, 2))
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        image = RowImage(pixels, f"image {number}")
        patches, grid = encoder.pack_patches(encoder.process_image(image))
        assert len(patches) == grid.prod()
        assert encoder.counts(image) == (len(patches) // 4, len(patches))
        assert encoder.tokens(image).ids.count(encoder.token) == len(patches) // 4
