"""Images whose placeholder tokens have other tokens between them (Mistral 3, Pixtral)."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge.core.commands import EncoderInput
from ed_infra.errors import ConfigError
from image_requests import GREEDY, answers, engine_of

TEXT = {
    "model_type": "mistral",
    "sliding_window": None,
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 2,
    "initializer_range": 0.5,
}
IMAGE, BREAK, END, SIDE = 156, 157, 158, 2


def model_of(name: str):
    from ed_infra import registry
    from ed_infra.enums import TaskType

    own = {
        "mistral3": {"tie_word_embeddings": False},
        "llava": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    }
    config = registry.get_config(name)(
        text_config=TEXT,
        vision_config=VISION,
        image_token_index=IMAGE,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        **own[name],
    )
    return registry.get_module(TaskType.IMAGE_TEXT_TO_TEXT, name).create(config, seed=3)


@pytest.fixture(scope="module", params=["mistral3", "llava"])
def served(request):
    model = model_of(request.param)
    return model, engine_of(model)


def prompt(model, seed: int, *images: tuple[int, int, int], names: tuple[int, ...] = ()):
    """Token ids, the arrays of a processor, and the items of images.

    Args:
        images: place of each image, and its rows and columns of features.
        names: seeds of the pixels; by default they follow from `seed`.
    """
    rng, form = np.random.default_rng(seed), model.patch_form
    ids, pixels, items = rng.integers(3, 150, size=48).tolist(), [], []
    for number, (start, rows, columns) in enumerate(images):
        own = ([IMAGE] * columns + [BREAK]) * rows
        ids[start : start + len(own)] = [*own[:-1], END]
        name = names[number] if names else seed * 10 + number
        size = rows * SIDE * form.merge, columns * SIDE * form.merge
        pixels.append(np.random.default_rng(name).normal(size=(3, *size)).astype(np.float32))
        patches, grid = form.pack_image(pixels[-1], np.array(size))
        places = [start + at for at, token in enumerate(own) if token == IMAGE]
        arrays = {"pixel_values": patches, "image_grid_thw": grid}
        items.append(EncoderInput.at(arrays, places))
    if not images:
        return ids, {}, []
    sizes = np.array([image.shape[1:] for image in pixels])
    most = sizes.max(axis=0)
    padded = [
        np.pad(x, ((0, 0), (0, most[0] - x.shape[1]), (0, most[1] - x.shape[2]))) for x in pixels
    ]
    return ids, {"pixel_values": np.stack(padded), "image_sizes": sizes}, items


def expected(model, ids, arrays, **_) -> list[int]:
    out = model.generate(np.array([ids]), max_new_tokens=10, eos_token_id=[], **arrays)
    return out.sequences[0, len(ids) :].tolist()


def test_item_spreads_its_rows_over_its_tokens():
    item = EncoderInput.at({"pixel_values": np.zeros(2)}, [3, 4, 6, 7, 9])
    assert (item.start, item.length, item.gaps, item.stop) == (3, 5, (2, 5), 10)
    assert item.spread([10, 11, 12, 13, 14]) == [10, 11, -1, 12, 13, -1, 14]
    assert item.key == EncoderInput.of({"pixel_values": np.zeros(2)}, 0, 5).key


@pytest.mark.nightly
def test_chunked_batched_and_preempted_images_produce_tokens_of_generate(served):
    model, engine = served
    cases = [
        prompt(model, 1, (2, 3, 4), (20, 2, 5)),
        prompt(model, 2, (5, 5, 6)),
        prompt(model, 3),
        prompt(model, 4, (1, 1, 1), (3, 6, 2), (30, 2, 2)),
    ]
    wanted = [expected(model, *case[:2]) for case in cases]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert answers(engine, cases) == wanted
    changed = prompt(model, 1, (2, 3, 4), (20, 2, 5), names=(70, 71))
    assert expected(model, *changed[:2]) != wanted[0], "the images have no effect"


@pytest.mark.nightly
def test_equal_text_with_another_image_shares_no_page_of_the_image(served):
    model, engine = served
    case, other = prompt(model, 5, (8, 3, 4)), prompt(model, 5, (8, 3, 4), names=(77,))
    outputs = []
    for ids, _, items in (case, case, other):
        engine.add_request("a", ids, GREEDY, encoder_inputs=items)
        got, cached = [], 0
        while engine.has_unfinished_requests:
            for out in engine.step():
                got += out.outputs[0].token_ids
                cached = out.metrics.num_cached_tokens
        outputs.append((got, cached))
    assert [got for got, _ in outputs] == [
        expected(model, *each[:2]) for each in (case, case, other)
    ]
    assert [cached for _, cached in outputs] == [0, 40, 8]


@pytest.mark.nightly
def test_nothing_is_compiled_after_warm_up(served):
    model = served[0]
    engine = engine_of(model, compile_runner=True)
    before = engine.loop.runner.num_traces
    for seed, (rows, columns) in enumerate([(1, 1), (3, 4), (4, 5), (6, 6)]):
        case = prompt(model, seed, (2, rows, columns))
        assert answers(engine, [case]) == [expected(model, *case[:2])]
    assert engine.loop.runner.num_traces == before


@pytest.mark.nightly
@pytest.mark.parametrize("places", [[2, 3, 4, 5, 6, 7], [2, 3, 4, 6, 7, 8]])
def test_placeholder_tokens_without_the_gaps_of_the_image_are_rejected(served, places):
    model, engine = served
    ids, _, (item,) = prompt(model, 6, (2, 3, 2))
    wrong = EncoderInput.at(item.arrays, places)
    with pytest.raises(ConfigError, match="have other tokens between them than the processor"):
        engine.add_request("wrong", ids, GREEDY, encoder_inputs=[wrong])
