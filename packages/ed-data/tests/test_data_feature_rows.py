"""Images of Mistral 3 and Pixtral: a token without a feature ends each row of features."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.rows.example import RowImage
from ed_data.tokens.patches import PatchEncoder, RowEncoder

from tests.image_processors import ROWS

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


@pytest.fixture(scope="module", params=ROWS)
def processor(request, tokenizer):
    def with_tokens(*names):
        own = pickle.loads(pickle.dumps(tokenizer))
        own.add_special_tokens({"additional_special_tokens": [*names]})
        own.chat_template = TEMPLATE
        return own

    return ROWS[request.param](with_tokens)


def test_tokens_and_patches_equal_the_output_of_the_processor(processor):
    assert RowEncoder.fits(processor) and not PatchEncoder.fits(processor)
    encoder, rng = RowEncoder(processor), np.random.default_rng(0)
    merge, side = processor.spatial_merge_size, processor.patch_size
    for number in range(30):
        height, width = (int(size) for size in rng.integers(1, 200, 2))
        image = RowImage(rng.integers(0, 256, (height, width, 3), np.uint8), f"image {number}")
        output, text = encoder._run(image.source, image)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoder.tokens(image).ids == ids
        patches, grid = encoder.pack_patches(output)
        assert encoder.counts(image) == (ids.count(encoder.feature), len(patches))
        assert grid.prod() == len(patches) == ids.count(encoder.feature) * merge**2
        # The pixels of the image, from its patches.
        c, (_, rows, columns) = 3, grid // np.array([1, merge, merge])
        blocks = patches.reshape(rows, columns, merge, merge, c, side, side)
        pixels = blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(c, *grid[1:] * side)
        assert np.array_equal(pixels, np.asarray(output["pixel_values"][0], np.float32))


def test_image_without_a_feature_is_refused(processor):
    pixels = np.broadcast_to(np.uint8(0), (1, 3000, 3))
    with pytest.raises(DataError, match=r"row 3: the processor refuses an image of 3000 x 1"):
        RowEncoder(processor).tokens(RowImage(pixels, "row 3"))


def test_batch_contains_the_patches_and_the_tokens_of_all_rows(mixture, jsonl, processor, tmp_path):
    sizes = [(30, 40), (8, 8), (90, 20)]
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (30 * number, 7, 3)).save(tmp_path / f"{number}.png")
    rows = []
    for count in (3, 0, 1, 2):
        parts = [*[{"type": "image"}] * count, {"type": "text", "text": f"question {count}?"}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": f"answer {count}"},
        ]
        rows.append({"messages": messages, "images": [f"{n}.png" for n in range(count)]})
    inform = {"data_files": jsonl(rows), "content_field": "messages"}
    made = mixture(informs=[inform], pack_tokens=True, pack_seq_length=256, seed=0)
    loader = build_loader(made, batch_size=2, shuffle=False, processor=processor)
    batch, seen = next(loader), 0
    for row, ids in enumerate(batch["input_ids"]):
        grids, placeholders = batch["image_grid_thw"][row], ids == processor.image_token_id
        patches = int(grids.prod(axis=1).sum())
        assert placeholders.sum() * processor.spatial_merge_size**2 == patches
        assert not batch["pixel_values"][row, patches:].any()
        of_images = np.isin(ids, processor.image_token_ids)
        assert (batch["labels"][row][of_images] == -100).all()
        ends = int((ids == processor.image_end_token_id).sum())
        assert ends == int(grids.any(axis=1).sum())
        seen += ends
    assert seen and seen % 6 == 0
