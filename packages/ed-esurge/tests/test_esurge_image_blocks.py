"""Images whose tokens attend to each other: a step computes all tokens of an image."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge import eSurge
from ed_esurge.core.commands import EncoderInput
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.core.request import Request
from ed_infra.errors import ConfigError
from ed_models.auto import AutoEasyDeLConfig, AutoEasyDeLModelForImageTextToText
from image_requests import GREEDY, answers

from tests.conformance import cases

IMAGE, LENGTH = 159, 16


@pytest.fixture(scope="module")
def gemma3():
    """A tiny Gemma 3 with 16 features of an image, windows, and random weights."""
    fields = cases.fields("gemma3", "four averages of an image, tied")
    text = {**fields["text_config"], "sliding_window": 20, "initializer_range": 0.2}
    vision = {**fields["vision_config"], "initializer_range": 0.5}
    config = AutoEasyDeLConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=LENGTH,
        image_token_index=IMAGE,
        initializer_range=0.5,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = AutoEasyDeLModelForImageTextToText.from_config(config, "float32", "float32", seed=3)
    return model


def engine_of(model, **options):
    settings = {
        "max_num_seqs": 3,
        "max_num_seq_buckets": (3,),
        "page_size": 8,
        "num_pages": 14,
        "max_num_batched_tokens": 24,
        "max_model_len": 80,
    }
    return eSurge(model, **{**settings, **options}, compile_runner=False, silent_mode=True)


def prompt(seed: int, *starts: int):
    """Token ids with an image at each start, the pixel values, and the encoder inputs."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 150, size=48).tolist()
    pixels = rng.normal(size=(len(starts), 3, 16, 16)).astype(np.float32)
    for start in starts:
        ids[start : start + LENGTH] = [IMAGE] * LENGTH
    items = [
        EncoderInput.of({"pixel_values": values}, start, LENGTH)
        for start, values in zip(starts, pixels, strict=True)
    ]
    return ids, pixels, items


def expected(model, ids, pixels):
    values = {"pixel_values": pixels[None]} if len(pixels) else {}
    out = model.generate(np.array([ids]), max_new_tokens=10, eos_token_id=[], **values)
    return out.sequences[0, len(ids) :].tolist()


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 30])
def test_chunk_of_a_prompt_cuts_no_image_in_two(count):
    items = tuple(prompt(1, 2, 20)[2])
    request = Request("r", list(range(48)), 4, encoder_inputs=items)
    cache = EncoderCache(64, 64, whole_items=True)
    cache.begin_step()
    request.num_computed = computed = 0
    while computed < 48:
        part = cache.admit(request, max(count, LENGTH))
        stop = computed + part
        assert part > 0
        assert not any(item.start < stop < item.start + LENGTH for item in items)
        request.num_computed = computed = min(stop, 48)
        cache.begin_step()


@pytest.mark.nightly
def test_chunked_batched_and_preempted_images_produce_tokens_of_generate(gemma3):
    engine = engine_of(gemma3)
    found = [
        prompt(1, 2, 20),
        prompt(2, 5),
        prompt(3),
        prompt(4, 1, 28),
        prompt(6, 32),
        prompt(7, 8, 32),
    ]
    wanted = [expected(gemma3, ids, pixels) for ids, pixels, _ in found]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert answers(engine, found) == wanted


@pytest.mark.nightly
def test_cached_part_of_an_image_produces_tokens_of_generate(gemma3):
    engine = engine_of(gemma3, num_pages=30)
    ids, pixels, items = prompt(5, 21)
    changed = [*ids[:40], 7, *ids[41:]]
    outputs = []
    for given in (ids, changed):
        engine.add_request("a", given, GREEDY, encoder_inputs=items)
        got, cached = [], 0
        while engine.has_unfinished_requests:
            for out in engine.step():
                got += out.outputs[0].token_ids
                cached = out.metrics.num_cached_tokens
        outputs.append((got, cached))
    assert [cached for _, cached in outputs] == [0, 40]
    assert outputs[0][0] == expected(gemma3, ids, pixels)
    assert outputs[1][0] == expected(gemma3, changed, pixels)
    ids, pixels, items = prompt(5, 21)
    short = [*ids[:37], 9, *ids[38:]]  # pages end at position 32, within the image
    engine.add_request("b", short, GREEDY, encoder_inputs=items)
    got = []
    while engine.has_unfinished_requests:
        for out in engine.step():
            got += out.outputs[0].token_ids
            assert out.metrics.num_cached_tokens == 32
    assert got == expected(gemma3, short, pixels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 16}, "all tokens of an image together, 16 tokens"),
        ({"long_prefill_token_threshold": 8}, "all tokens of an image together, 16 tokens"),
        ({"batch_invariant": True}, "batch_invariant computes each token separately"),
    ],
)
@pytest.mark.nightly
def test_options_that_would_cut_images_raise_config_error(gemma3, options, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(gemma3, **options)


@pytest.mark.nightly
def test_adjacent_images_without_room_in_a_step_raise_config_error(gemma3):
    ids, _, items = prompt(6, 2, 18)
    with pytest.raises(ConfigError, match="32 placeholder tokens at position 2"):
        engine_of(gemma3).add_request("x", ids, GREEDY, encoder_inputs=items)
