"""Images in prompts: the engine produces the tokens of `generate`, and encodes each image once."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge import eSurge
from ed_esurge.core.commands import EncoderInput
from ed_infra.errors import ConfigError
from image_requests import GREEDY, answers

TEXT = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.5,
}
IMAGE, LENGTH = 159, 16


@pytest.fixture(scope="module")
def llava():
    from ed_models.families.llava import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_index=IMAGE,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlavaForConditionalGeneration.create(config, seed=3)


@pytest.fixture(scope="module")
def engine(llava):
    """An engine whose chunks split the images, and whose pages do not hold all requests."""
    return eSurge(
        llava,
        max_num_seqs=3,
        max_num_seq_buckets=(3,),
        page_size=8,
        num_pages=14,
        max_num_batched_tokens=24,
        max_model_len=80,
        compile_runner=False,
        silent_mode=True,
    )


def prompt(seed: int, *starts: int, images: tuple[int, ...] = ()):
    """Token ids with an image at each start, and the pixel values."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 150, size=48).tolist()
    for start in starts:
        ids[start : start + LENGTH] = [IMAGE] * LENGTH
    names = images or tuple(seed * 10 + place for place in range(len(starts)))
    pixels = [
        np.random.default_rng(name).normal(size=(3, 16, 16)).astype(np.float32) for name in names
    ]
    items = [
        EncoderInput.of({"pixel_values": values}, start, LENGTH)
        for start, values in zip(starts, pixels, strict=True)
    ]
    return ids, pixels, items


def expected(model, ids, pixels):
    values = {"pixel_values": np.stack(pixels)[None]} if pixels else {}
    out = model.generate(np.array([ids]), max_new_tokens=10, eos_token_id=[], **values)
    return out.sequences[0, len(ids) :].tolist()


@pytest.mark.nightly
def test_chunked_batched_and_preempted_images_produce_tokens_of_generate(llava, engine):
    cases = [
        prompt(1, 2, 20),
        prompt(2, 5),
        prompt(3),
        prompt(4, 1, 28),
        prompt(6, 32),
        prompt(7, 8, 32),
    ]
    wanted = [expected(llava, ids, pixels) for ids, pixels, _ in cases]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert answers(engine, cases) == wanted


@pytest.mark.nightly
def test_equal_text_with_another_image_shares_no_page_of_the_image(llava, engine):
    ids, pixels, items = prompt(5, 8)
    other = prompt(5, 8, images=(77,))
    outputs = []
    for given in (items, items, other[2]):
        engine.add_request("a", ids, GREEDY, encoder_inputs=given)
        got, cached = [], 0
        while engine.has_unfinished_requests:
            for out in engine.step():
                got += out.outputs[0].token_ids
                cached = out.metrics.num_cached_tokens
        outputs.append((got, cached))
    wanted = expected(llava, ids, pixels)
    assert outputs[0][0] == outputs[1][0] == wanted
    assert outputs[2][0] == expected(llava, ids, other[1]) != wanted
    assert [cached for _, cached in outputs] == [0, 40, 8]


@pytest.mark.nightly
def test_metrics_count_the_cached_images(llava, engine):
    ids, _, items = prompt(8, 2, 20)
    before = engine.stats()
    answers(engine, [(ids, None, items)])
    after = engine.stats()
    assert after["mm_cache_queries"] == before["mm_cache_queries"] + 2
    assert after["mm_cache_hits"] == before["mm_cache_hits"]
    assert after["encoder_cache_usage"] == 0  # no request runs
    table = engine.loop.runner.memory.encoded
    rows = after["encoder_cache_entries"] * LENGTH
    assert 2 * LENGTH <= rows <= len(table)
    assert after["encoder_cache_bytes"] == rows * table.nbytes // len(table)


@pytest.mark.nightly
def test_image_of_wrong_length_is_rejected(engine):
    ids, _, items = prompt(6, 2)
    wrong = EncoderInput.of(items[0].arrays, 2, LENGTH - 1)
    with pytest.raises(ConfigError, match="the encoder returns 16 positions"):
        engine.add_request("wrong", ids, GREEDY, encoder_inputs=[wrong])


@pytest.mark.nightly
def test_image_of_wrong_size_fails_alone(engine):
    ids, _, items = prompt(6, 2)
    wrong = EncoderInput.of({"pixel_values": np.zeros((3, 8, 8), np.float32)}, 2, LENGTH)
    engine.add_request("wrong", ids, GREEDY, encoder_inputs=[wrong])
    engine.add_request("right", ids, GREEDY, encoder_inputs=items)
    ended = {}
    while engine.has_unfinished_requests:
        ended |= {out.request_id: out for out in engine.step() if out.finished}
    assert "images of 8 x 8, but image_size is 16 x 16" in ended["wrong"].error
    assert ended["right"].error is None


def test_text_model_rejects_images(surge):
    item = EncoderInput.of({"pixel_values": np.zeros((3, 4, 4), np.float32)}, 0, 1)
    with pytest.raises(ConfigError, match="none: the model has no encoder"):
        surge.add_request("x", [5, 6], GREEDY, encoder_inputs=[item])
