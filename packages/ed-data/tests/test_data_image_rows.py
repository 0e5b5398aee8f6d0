"""Rows with one image: classes of images, and captions."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.schema import IMAGE_CLASSIFICATION, IMAGE_TEXT

Image = pytest.importorskip("PIL.Image")


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 30), (value, 255 - value, 3)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def images():
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 8, "width": 8})


@pytest.fixture
def rows(tmp_path):
    """Return six rows whose images are files beside the rows."""
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(png(40 * i))
    return [
        {"image": f"{i}.png", "label": ["cat", "dog"][i % 2], "text": f"number {i}"}
        for i in range(6)
    ]


def test_image_rows_become_pixels_and_labels(images, rows, mixture, jsonl) -> None:
    made = mixture(informs=[{"data_files": jsonl(rows)}], pack_tokens=False)
    schema = IMAGE_CLASSIFICATION.with_classes(("cat", "dog"))
    loader = build_loader(made, processor=images, batch_size=6, schema=schema, shuffle=False)
    batch = loader.batch_at(0)
    assert batch.keys() == {"labels", "pixel_values"}
    assert batch["labels"].tolist() == [0, 1, 0, 1, 0, 1]
    want = images(images=[Image.open(io.BytesIO(png(80)))], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(batch["pixel_values"][2], want)


@pytest.mark.nightly
def test_caption_rows_become_pixels_and_tokens(images, rows, mixture, jsonl, tokenizer) -> None:
    from transformers import CLIPProcessor

    processor = CLIPProcessor(images, pickle.loads(pickle.dumps(tokenizer)))
    made = mixture(informs=[{"data_files": jsonl(rows)}], pack_tokens=False)
    loader = build_loader(
        made, processor=processor, batch_size=3, seq_length=16, schema=IMAGE_TEXT, shuffle=False
    )
    batch = loader.batch_at(0)
    assert {"input_ids", "segment_ids", "pixel_values"} <= batch.keys()
    assert "labels" not in batch
    assert batch["pixel_values"].shape == (3, 1, 3, 8, 8)
    ids = batch["input_ids"][1][batch["segment_ids"][1] > 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "number 1"


def test_image_rows_without_processor_raise_data_error(rows, mixture, jsonl) -> None:
    made = mixture(informs=[{"data_files": jsonl(rows)}], pack_tokens=False)
    with pytest.raises(DataError, match="requires a processor"):
        build_loader(made, batch_size=2, schema=IMAGE_CLASSIFICATION)


@pytest.mark.nightly
def test_held_out_images_are_never_trained_on(images, rows, mixture, jsonl) -> None:
    rows = [{**row, "image": f"{i % 3}.png"} for i, row in enumerate(rows * 4)]
    made = mixture(informs=[{"data_files": jsonl(rows)}], pack_tokens=False, eval_fraction=0.5)
    schema = IMAGE_CLASSIFICATION.with_classes(("cat", "dog"))
    seen = []
    for split in ("train", "eval"):
        loader = build_loader(made, processor=images, batch_size=1, schema=schema, split=split)
        steps = range(24) if split == "train" else range(loader.steps_per_epoch)
        seen.append({loader.batch_at(step)["pixel_values"].tobytes() for step in steps})
    assert not seen[0] & seen[1]
