"""Masks and outputs as pytrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import masks
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_infra.outputs import CausalLMOutput, Metric, add_metrics
from hypothesis import given, settings
from hypothesis import strategies as st

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1, 1]])


def by_hand(segments, causal=True, window=None, chunk=None):
    """The definition, one pair at a time; index counts inside a segment."""
    b, s = segments.shape
    result = np.zeros((b, s, s), bool)
    for row in range(b):
        first = {v: list(segments[row]).index(v) for v in segments[row]}
        index = [i - first[v] for i, v in enumerate(segments[row])]
        for q in range(s):
            for k in range(s):
                if segments[row, q] != segments[row, k] or segments[row, q] == 0:
                    continue
                if causal and k > q:
                    continue
                if window and abs(index[q] - index[k]) >= window:
                    continue
                if chunk and index[q] // chunk != index[k] // chunk:
                    continue
                result[row, q, k] = True
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "limits", [{}, {"window": 2}, {"chunk": 2}, {"window": 3, "chunk": 2}], ids=str
)
def test_allowed_mask_matches_reference(causal: bool, limits: dict):
    info = MaskInfo.from_segments(SEGMENTS, causal)
    np.testing.assert_array_equal(info.get_mask(**limits), by_hand(SEGMENTS, causal, **limits))


def test_limits_may_be_traced_and_zero_is_none():
    info = MaskInfo.from_segments(SEGMENTS)
    allowed = jax.jit(lambda info, w, c: info.get_mask(w, c))
    np.testing.assert_array_equal(allowed(info, 2, 0), by_hand(SEGMENTS, window=2))
    np.testing.assert_array_equal(allowed(info, 0, 2), by_hand(SEGMENTS, chunk=2))
    np.testing.assert_array_equal(allowed(info, 0, 0), by_hand(SEGMENTS))


def test_order_starts_again_in_each_segment_and_counts_holes():
    assert masks.segment_index(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, *range(6)]]
    assert MaskInfo.from_attention_mask([[0, 1, 0, 1]]).q_index.tolist() == [[0, 0, 1, 2]]


def test_left_padding_equals_no_padding():
    padded = MaskInfo.from_attention_mask([[0, 0, 1, 1, 1]]).get_mask(window=2)[0, 2:, 2:]
    plain = MaskInfo.full(1, 3).get_mask(window=2)[0]
    np.testing.assert_array_equal(padded, plain)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_cu_seqlens_produce_matching_segment_ids(lengths: list[int], padding: int):
    offsets = np.cumsum([0, *lengths])
    info = MaskInfo.from_cu_seqlens(offsets, int(offsets[-1]) + padding)
    expected = np.repeat(np.arange(1, len(lengths) + 1), lengths).tolist() + [0] * padding
    assert info.q_segment_ids.tolist() == [expected]


def test_mask_bias_is_finite():
    bias = MaskInfo.from_segments(SEGMENTS).create_bias(jnp.bfloat16)
    assert bias.shape == (2, 1, 8, 8)
    assert bool(jnp.isfinite(bias).all())
    np.testing.assert_array_equal(bias[:, 0] == 0, by_hand(SEGMENTS))


def test_the_masks_of_a_configuration():
    config = EasyDeLBaseConfig(max_position_embeddings=4, fcm_max_ratio=0.5)
    mask = config.get_basic_causal_mask(max_length=3, dtype=jnp.float32)
    np.testing.assert_array_equal(mask[0, 0], np.tril(np.ones((3, 3))))
    assert config.get_basic_causal_mask().shape == (1, 1, 4, 4)
    assert config.replace(precompute_masks=False).get_basic_causal_mask() is False
    key = jax.random.key(0)
    assert config.get_fcm_mask(2, 5, True) is None
    assert EasyDeLBaseConfig().get_fcm_mask(2, 5, False, key=key) is None
    assert config.get_fcm_mask(2, 5, False, key=key).shape == (2, 1, 5, 5)
    dropped = config.get_fcm_mask(key=key, shape=(64, 1, 4, 100), fcm_ratio=0.1)
    assert float(jnp.mean(~dropped)) == pytest.approx(0.1, abs=0.01)
    assert bool(dropped[..., 0].all())
    assert bool((dropped == dropped[:, :, :1]).all())  # a key is dropped for all queries
    with pytest.raises(ConfigError, match="batch_size and seq_length"):
        config.get_fcm_mask(2)


def test_forgetful_mask_without_a_key_differs_between_calls():
    config = EasyDeLBaseConfig(fcm_min_ratio=0.4, fcm_max_ratio=0.6)
    first, second = (config.get_fcm_mask(2, 400, False) for _ in range(2))
    assert first.shape == (2, 1, 400, 400) and bool(first[..., 0].all())
    assert bool((first != second).any())


def test_partition_axis_of_none_is_the_default():
    default = EasyDeLBaseConfig()
    for config in (EasyDeLBaseConfig(partition_axis=None), default.replace(partition_axis=None)):
        assert config.partition_axis == default.partition_axis
    config = EasyDeLBaseConfig()
    config.add_basic_configurations(partition_axis=None)
    assert config.partition_axis == default.partition_axis


def test_save_pretrained_of_a_configuration_refuses_unread_keywords(tmp_path):
    config = EasyDeLBaseConfig()
    for keyword, words in [
        ({"foo": 1}, "no keyword 'foo'"),
        ({"repo": "a/b"}, "did you mean 'repo_id'"),
        ({"repo_id": "a/b"}, "no effect without push_to_hub"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.save_pretrained(tmp_path, **keyword)
    config.save_pretrained(tmp_path)
    assert EasyDeLBaseConfig.from_pretrained(tmp_path).model_type == config.model_type


def test_metrics_sum_before_division():
    total = Metric.of(6.0, 2.0) + Metric.of(0.0, 4.0)
    assert float(total.value) == 1.0
    assert float(Metric.of(0.0, 0.0).value) == 0.0
    merged = add_metrics({"a": Metric.of(1), "b": Metric.of(2)}, {"a": Metric.of(3)})
    assert float(merged["a"].value) == 2.0
    assert float(merged["b"].value) == 2.0
    grad = jax.grad(lambda w: Metric.of(1.0, w).value)(0.0)
    assert bool(jnp.isfinite(grad))


def test_outputs_go_through_jit_and_read_by_name():
    output = CausalLMOutput(logits=jnp.ones(2), aux={"z": Metric.of(1.0)})
    doubled = jax.jit(lambda o: jax.tree.map(lambda x: 2 * x, o))(output)
    assert isinstance(doubled, CausalLMOutput)
    assert doubled["logits"].tolist() == [2.0, 2.0]
    assert list(output.keys()) == ["logits", "losses", "aux", "updates"]
    assert output.replace(logits=None).logits is None
    with pytest.raises(KeyError, match="no field 'logit'"):
        output["logit"]
