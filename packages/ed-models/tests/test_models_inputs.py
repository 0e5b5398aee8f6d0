"""Rotary tables of a batch: by kind of layer, by axes of positions, by length of each sequence."""

import numpy as np
import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.rope.frequencies import inv_frequencies, settings
from ed_infra.rope.rotation import angles
from ed_layers.context import ALL_LAYERS
from ed_models.body.context import layer_context


class ByTypeConfig(EasyDeLBaseConfig, transformers.Gemma3TextConfig):
    model_type = "by_type"


def plain(**rope):
    return EasyDeLBaseConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters={"rope_theta": 10000.0, **rope},
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )


def tables(config, shape, **inputs):
    return layer_context(config, shape, **inputs)[0].rope


@pytest.mark.nightly
def test_layer_types_have_tables_of_their_own():
    config = ByTypeConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    found = tables(config, (1, 6))
    assert found.keys() == {"full_attention", "sliding_attention"}
    for kind, (cos, _) in found.items():
        frequencies, _ = inv_frequencies(settings(config, layer_type=kind))
        np.testing.assert_allclose(cos[0], angles(np.arange(6), frequencies)[0], atol=1e-6)


@pytest.mark.nightly
def test_positions_with_axes_turn_the_sections_of_each():
    config = plain(rope_type="default", mrope_section=[1, 2, 1])
    text = np.broadcast_to(np.arange(5), (3, 2, 5))
    flat = tables(config, (2, 5))[ALL_LAYERS]
    for got, expected in zip(
        tables(config, (2, 5), position_ids=text)[ALL_LAYERS], flat, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    moved = text.copy()
    moved[1] += 7  # the height alone
    cos, _ = tables(config, (2, 5), position_ids=moved)[ALL_LAYERS]
    np.testing.assert_array_equal(cos[..., [0, 3]], flat[0][..., [0, 3]])
    assert np.abs(cos[..., 1:3] - flat[0][..., 1:3]).min() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("width", [12, 40])
def test_the_width_of_the_batch_changes_nothing(width):
    config = plain(rope_type="dynamic", factor=4.0)
    mask = np.zeros((2, width), np.int32)
    mask[0, -12:] = 1  # within the trained length
    mask[1, -width:] = 1
    cos, _ = tables(config, mask.shape, attention_mask=mask)[ALL_LAYERS]
    alone, _ = tables(config, (1, 12))[ALL_LAYERS]
    np.testing.assert_allclose(cos[0, -12:], alone[0], atol=1e-6)
