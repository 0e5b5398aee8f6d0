"""An image and its class, or an image and its caption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ed_data.errors import KeyPath
from ed_data.kinds.fields import IMAGE, Column, Value
from ed_data.kinds.record import KindOfRows, Schema
from ed_data.kinds.targets import place_classes, read_class, refuse_packing

if TYPE_CHECKING:
    from ed_data.config import Mixture
    from ed_data.kinds.record import Batch


def check_image(mixture: Mixture, schema: Schema) -> Iterator[tuple[KeyPath, str]]:
    """Yield `save` and `pack_tokens`: a row has no text and one label."""
    if mixture.save is not None:
        yield ("save",), "rows without text cannot be saved: omit save"
    yield from refuse_packing(mixture, schema)


def keep_classes(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return only the classes of a batch: the model reads the images."""
    return {"labels": place_classes(batch, pad_id, start)["labels"]}


def drop_labels(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return a batch without labels: every image belongs to its own text."""
    del batch["labels"]
    return batch


#: An image and the number of its class: `pixel_values` [b, 1, c, h, w], `labels` [b].
IMAGE_CLASSIFICATION = Schema(
    (Column("", IMAGE),),
    IMAGE,
    (Value("label", "label"),),
    record=KindOfRows(
        {IMAGE: "photo.png", "label": 1},
        "image_classification",
        columns=("",),
        labels=("label",),
        has_text=False,
        has_image=True,
        read_value=read_class,
        arrays=keep_classes,
        checks=check_image,
    ),
)
#: An image and its caption: `pixel_values` [b, 1, c, h, w], `input_ids`, `segment_ids`.
IMAGE_TEXT = Schema(
    (Column("", "text"),),
    "text",
    other_content=("caption",),
    record=KindOfRows(
        {IMAGE: "photo.png", "text": "a red square"},
        "image_text",
        has_image=True,
        arrays=drop_labels,
        checks=refuse_packing,
    ),
)
