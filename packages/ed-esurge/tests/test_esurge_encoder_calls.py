"""One call of an encoder for several items writes the same rows as one call for each item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import RequestError
from ed_esurge.runner.encoder import ItemEncoder
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.weights import ServedWeights
from ed_infra import registry
from ed_infra.config.subclass import known_names
from ed_infra.enums import TaskType
from ed_models.modalities.items import build_encoder_items

from tests.conformance.cases import subjects

ITEMS = 7


class Encoder:
    """A tiny model, its encoder, and an empty table for the outputs of `ITEMS` items."""

    def __init__(self, model_type: str, *, at_once: tuple[int, ...]):
        subject = next(s for s in subjects(model_type) if s.task == TaskType.IMAGE_TEXT_TO_TEXT)
        config_class = registry.get_config(model_type)
        fields = {n: v for n, v in subject.fields.items() if n in known_names(config_class)}
        model: Any = subject.module_class.create(config_class(**fields), seed=0)
        items = build_encoder_items(model, 256)
        assert items is not None
        self.items, self.traces = items, 0
        self.length = items.count(items.examples()[0])
        self.memory = Memory(
            model,
            page_size=8,
            num_pages={"full": 2},
            max_num_seqs=1,
            encoder_rows=ITEMS * self.length,
            encoder_features=items.features,
        )
        self.memory.allocate()
        self.encoder = ItemEncoder(
            ServedWeights(model), self.memory, self.counted, items, at_once=at_once
        )

    def counted(self, function: Any) -> Any:
        def counts(*arguments: Any) -> Any:
            self.traces += 1
            return function(*arguments)

        return counts

    def given(self) -> list[EncodedItem]:
        """Items of the smallest shape, with other pixels each."""
        example, found = self.items.examples()[0], []
        for number in range(ITEMS):
            rng = np.random.default_rng(number)
            arrays = dict(example)
            arrays["pixel_values"] = rng.normal(size=example["pixel_values"].shape)
            if "image_grid_thw" in arrays:
                side = int(len(arrays["pixel_values"]) ** 0.5)
                arrays["image_grid_thw"] = np.array([1, side, side], np.int32)
            if "image_sizes" in arrays:
                arrays["image_sizes"] = np.array([9 + number, 20], np.int32)
            rows = [*range(number * self.length, (number + 1) * self.length)]
            found.append(EncodedItem(str(number), arrays, rows))
        return found

    def table(self) -> np.ndarray:
        self.encoder.run(self.given())
        return np.asarray(self.memory.encoded)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "llava_next"])
def test_several_items_of_one_shape_share_a_call_and_keep_their_rows(model_type):
    alone, together = Encoder(model_type, at_once=()), Encoder(model_type, at_once=(4, 2))
    wanted, found = alone.table(), together.table()
    assert np.abs(wanted).reshape(ITEMS, -1).max(1).all()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert (alone.traces, together.traces) == (1, 3)  # 7 = 4 + 2 + 1


@pytest.mark.nightly
def test_compiled_calls_of_each_number_of_items_are_used():
    encoder = Encoder("llava", at_once=(4, 2))
    encoder.encoder.compile()
    compiled = encoder.traces
    assert compiled == 3
    encoder.table()
    assert encoder.traces == compiled


def test_item_that_does_not_match_the_model_is_named():
    encoder = Encoder("llava", at_once=(4, 2))
    items = encoder.given()
    items[5] = EncodedItem("other", {"pixel_values": np.zeros((1, 2))}, items[5].rows)
    with pytest.raises(RequestError) as error:
        encoder.encoder.run(items)
    assert error.value.request_id == "other"
