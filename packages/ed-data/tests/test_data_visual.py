"""Visual rows: reading, checks, saving, prompt batches, and rejection without a processor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_data import (
    DataError,
    Inform,
    Media,
    Mixture,
    build_loader,
    build_prompts,
    documents,
    read_rows,
    save_mixture,
)
from pydantic import ValidationError

PIXELS = [[[0, 1, 2], [3, 4, 5]]]


@pytest.fixture
def pictures(tmp_path):
    """A json file of paths and captions in the folder of the images."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.png").write_bytes(b"png %d" % i)
    rows = [{"image_path": f"{i}.png", "caption": f"picture {i}"} for i in range(6)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def visual(files, **options) -> Inform:
    given = {"image_field": "image_path", "text_field": "caption", **options}
    return Inform(type="visual", data_files=str(files), name="v", **given)


@pytest.mark.proves(
    "mixture.informs.image_field", "mixture.informs.text_field", "mixture.informs.type"
)
def test_documented_visual_block_reads_images(pictures):
    """EasyDeL documents `type: visual, image_field: image_path, text_field: caption`."""
    found = list(documents(visual(pictures / "*.json")))
    assert [example.content for example in found] == [f"picture {i}" for i in range(6)]
    assert [example.image for example in found] == [str(pictures / f"{i}.png") for i in range(6)]
    assert len({example.digest for example in found}) == 6


@pytest.mark.proves("mixture.informs.pixel_field")
def test_pixel_and_byte_fields_yield_images(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"p": PIXELS, "b": b"png", "d": {"bytes": b"png", "path": "a.png"}, "t": "one"},
        {"p": [[[9, 9, 9]]], "b": b"gif", "d": {"bytes": None, "path": "s3://x/y"}, "t": "one"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = {
        name: [
            e.image
            for e in documents(
                visual(tmp_path / "a.parquet", text_field="t", **field),
                media=Media(allowed=["s3://x"]),
            )
        ]
        for name, field in {
            "p": {"pixel_field": "p", "image_field": None},
            "b": {"image_field": "b"},
            "d": {"image_field": "d"},
        }.items()
    }
    assert [image.shape for image in found["p"]] == [(1, 2, 3), (1, 1, 3)]
    assert np.array_equal(found["p"][0], PIXELS)
    assert found["b"] == [b"png", b"gif"]
    assert found["d"] == [{"bytes": b"png", "path": "a.png"}, "s3://x/y"]
    # Equal texts with different images are two documents.
    digests = {
        e.digest for e in documents(visual(tmp_path / "a.parquet", text_field="t", image_field="b"))
    }
    assert len(digests) == 2


@pytest.mark.proves("mixture.image_target_field")
@pytest.mark.parametrize("field", ["image_field", "pixel_field"])
def test_saved_images_are_read_back_unchanged(pictures, tmp_path, field):
    rows = pictures / "rows.json"
    if field == "pixel_field":
        rows.write_text(json.dumps([{"image_path": PIXELS, "caption": "one"}]))
    inform = visual(rows, **{"image_field": None, field: "image_path"})
    made = Mixture(
        informs=[inform],
        image_target_field="picture",
        cache_dir=tmp_path / "cache",
        save={"path": tmp_path / "saved"},
    )
    (path,) = save_mixture(made)
    first = next(iter(read_rows(Inform(data_files=path))))
    expected = PIXELS if field == "pixel_field" else str(pictures / "0.png")
    assert first["picture"] == expected
    again = visual(path, text_field="text", **{"image_field": None, field: "picture"})
    media = Media(allowed=[pictures])  # the saved rows name the files by their absolute paths
    assert np.array_equal(next(iter(documents(again, media=media))).image, expected)


def test_prompt_batches_contain_images_and_token_batches_reject_images(
    pictures, tokenizer, tmp_path
):
    made = Mixture(informs=[visual(pictures / "rows.json")], cache_dir=tmp_path / "cache")
    batch = build_prompts(made, tokenizer, batch_size=3).batch_at(0)
    numbers = [int(str(prompt)[-1]) for prompt in batch.prompts]
    assert batch.fields["image"] == [str(pictures / f"{i}.png") for i in numbers]
    with pytest.raises(DataError, match="'v' has images, but a loader without a processor") as e:
        build_loader(made, tokenizer, seq_length=16)
    assert e.value.path == ("informs", 0, "type")


@pytest.mark.parametrize(
    ("row", "field", "says"),
    [
        ({"image_path": "x.png"}, "image_field", r"rows\.json, item 0: there is no image 'x\.png'"),
        ({"image_path": 3}, "image_field", r"a path, bytes, or \{path, bytes\}, got int 3"),
        ({"image_path": {}}, "image_field", "a path, bytes"),
        ({"image_path": [[1], [1, 2]]}, "pixel_field", "must hold pixels"),
        ({"image_path": [1, 2]}, "pixel_field", "must hold pixels"),
        ({"image_path": [["a"]]}, "pixel_field", "must hold pixels"),
        ({"other": "x"}, "image_field", "there is no field 'image_path'"),
    ],
)
def test_rows_without_an_image_are_named(pictures, row, field, says):
    (pictures / "rows.json").write_text(json.dumps([{"caption": "one", **row}]))
    inform = visual(pictures / "rows.json", **{"image_field": None, field: "image_path"})
    with pytest.raises(DataError, match=says) as error:
        list(documents(inform))
    assert error.value.path == (field,)
    (pictures / "rows.json").write_text(json.dumps([{"caption": "one", "image_path": None}]))
    assert list(documents(inform)) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"type": "visual"}, "require image_field"),
        ({"type": "visual", "image_field": "a", "pixel_field": "b"}, "exclude each other"),
        ({"text_field": "a"}, "text_field requires visual rows"),
        (
            {"image_field": "a", "text_field": "b", "content_field": "c"},
            "an alias of content_field",
        ),
        ({"type": "visul"}, "did you mean 'visual'"),
    ],
)
def test_invalid_visual_options_raise_validation_error(options, says):
    with pytest.raises(ValidationError, match=says):
        Inform(data_files="a.json", **options)
