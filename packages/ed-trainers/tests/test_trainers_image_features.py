"""Outputs of a frozen vision encoder in batches: values, shapes, the byte limit, refusals."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_trainers.losses.pairs import as_rows
from ed_trainers.rollout import Weights
from ed_trainers.running.image_features import ByteCache, ImageFeatures
from ed_trainers.state import EasyDeLState

IMAGE, MERGE, NUMBERS, LENGTH = 156, 2, 12, 40
LANGUAGE = [("language_model|lm_head", True)]
#: Rows and columns of features of the images of each row. Equal sizes have equal contents.
ROWS = [[(3, 4)], [], [(1, 2), (3, 4)], [(2, 2), (1, 2)]]


@pytest.fixture(scope="module")
def qwen():
    from ed_models.families.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 160,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "initializer_range": 0.3,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "patch_size": 2,
            "temporal_patch_size": 1,
            "initializer_range": 0.3,
        },
        image_token_id=IMAGE,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return Qwen2VLForConditionalGeneration.create(config, seed=3)


def batch(rows=ROWS) -> Inputs:
    """Return a batch as a loader returns it: patches and grids, padded with zeros."""
    ids = np.random.default_rng(0).integers(3, 150, (len(rows), LENGTH)).astype(np.int32)
    pixels = np.zeros((len(rows), 128, NUMBERS), np.float32)
    grids = np.zeros((len(rows), 2, 3), np.int32)
    for row, images in enumerate(rows):
        place, patch = 3, 0
        for number, (height, width) in enumerate(images):
            grids[row, number] = 1, height * MERGE, width * MERGE
            count, features = grids[row, number].prod(), height * width
            values = np.random.default_rng(10 * height + width).normal(size=(count, NUMBERS))
            pixels[row, patch : patch + count] = values
            ids[row, place : place + features] = IMAGE
            place, patch = place + features + 2, patch + count
    segments = np.ones_like(ids)
    return Inputs(
        {"input_ids": ids, "segment_ids": segments, "pixel_values": pixels, "image_grid_thw": grids}
    )


def features_of(model, *, trainable=LANGUAGE, frozen=None, most=2**20) -> ImageFeatures:
    state = EasyDeLState.create(model=model, trainable=trainable)
    parts = (state.graphdef, state.graphstate, state.graphother)
    return ImageFeatures(model, state, frozen or {}, lambda: Weights(*parts, version=0), most)


def logits(model, given: Inputs) -> np.ndarray:
    call = jax.jit(lambda batch: model(**batch.select(model.input_names)).logits)
    return np.asarray(call(given))


def test_features_replace_images_of_rows_and_pairs_without_changing_logits(qwen):
    images, given = features_of(qwen), batch()
    wanted = logits(qwen, given)
    made = images(given)
    assert {*made} == {"input_ids", "segment_ids", "image_grid_thw", "image_features"}
    assert made["image_features"].shape == (4, 16, 16)
    assert images.encoded == 3, "the rows have three different images"
    np.testing.assert_allclose(logits(qwen, made), wanted, atol=1e-5)
    pairs = Inputs(
        {name: np.stack([x, x], axis=1) for name, x in given.items()},
        {
            name: (axes[0], None, *axes[1:])
            for name in given
            for axes in [given.get_logical_axes(name)]
        },
    )
    both = images(pairs)
    assert both["image_features"].shape == (4, 2, 16, 16)
    assert both.get_logical_axes("image_features") == ("batch", None, None, None)
    np.testing.assert_allclose(logits(qwen, as_rows(both))[::2], wanted, atol=1e-5)
    assert images.encoded == 3, "the second batch has no other image"
    assert images._encode._cache_size() == 1, "images of one bucket share a program"


def test_batch_without_images_has_features_of_padding(qwen):
    made = features_of(qwen)(batch([[], []]))
    assert made["image_features"].shape == (2, 16, 16)
    assert not made["image_features"].any()


def test_dropped_features_are_computed_again(qwen):
    one = 12 * 16 * 4  # bytes of the largest image
    images, given = features_of(qwen, most=one), batch()
    first, second = images(given), images(given)
    np.testing.assert_array_equal(first["image_features"], second["image_features"])
    assert 3 < images.encoded <= 6
    assert images._cache.nbytes <= one


def test_row_with_wrong_number_of_placeholder_tokens_is_refused(qwen):
    given = batch()
    ids = given["input_ids"].copy()
    ids[0, 30] = IMAGE
    with pytest.raises(
        ConfigError, match=r"13 placeholder tokens \[156.*\], but its items have 12"
    ):
        features_of(qwen)(given.replace(input_ids=ids))


@pytest.mark.parametrize("trained", ["visual.blocks", "visual.merger"])
def test_trained_encoder_is_refused(qwen, trained):
    with pytest.raises(ConfigError, match=r"training changes .* of its .* parameters \(model.vis"):
        features_of(qwen, trainable=[(trained, True), *LANGUAGE])


def test_adapters_of_the_encoder_that_are_not_trained_are_refused(qwen):
    from ed_infra.specs import LoraSpec
    from ed_models.adapters.lora import apply_lora

    model = apply_lora(qwen, LoraSpec(rank=2, targets=("visual",)))
    with pytest.raises(ConfigError, match=r"adapters that are not trained \(model.visual.*lora"):
        features_of(model)


@pytest.mark.nightly
def test_frozen_model_with_another_encoder_is_refused(qwen):
    assert features_of(qwen, frozen={"reference": qwen})
    other = type(qwen).create(qwen.config, seed=4)
    with pytest.raises(ConfigError, match="the encoder of the frozen model 'reference' differs"):
        features_of(qwen, frozen={"reference": other})


def test_model_without_images_is_refused(toy, tmp_path):
    from ed_trainers import SFTArguments, SFTTrainer

    arguments = SFTArguments(image_feature_cache_gib=1, save_directory=str(tmp_path))
    with pytest.raises(ConfigError, match="ToyModel does not insert features of images"):
        SFTTrainer(arguments, toy.model(), toy.loader())


def test_least_recently_used_arrays_are_dropped():
    cache = ByteCache(100)
    for name, size in ((b"a", 40), (b"b", 40)):
        cache.put(name, np.zeros(size, np.uint8))
    assert cache.get(b"a") is not None
    cache.put(b"c", np.zeros(30, np.uint8))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    cache.put(b"d", np.zeros(101, np.uint8))
    assert cache.get(b"d") is None
    assert cache.nbytes == 70
