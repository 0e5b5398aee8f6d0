"""Attention to near tokens and to summaries of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention.blocks.settings import RelativeBuckets
from ed_layers.attention.blocks.summary_attention import Blocks, SummaryAttention
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from flax import nnx

#: Padding, a segment of 7 tokens, one of 2, one of 8, padding.
SEGMENTS = np.array([[0, 0, *[1] * 7, 2, 2, *[3] * 8, 0]])


class TinyConfig(EasyDeLBaseConfig):
    """Sizes of one layer."""

    hidden_size: int = 8
    num_attention_heads: int = 2
    rms_norm_eps: float = 1e-6


def test_blocks_are_counted_in_each_segment() -> None:
    blocks = Blocks.of(MaskInfo.from_segments(SEGMENTS, causal=False), 3)
    # 7 tokens: blocks of 3 and 4; 2 tokens: none; 8 tokens: blocks of 3 and 5.
    assert blocks.slot[0].tolist() == [6, 6, *[0] * 3, *[1] * 4, 6, 6, *[2] * 3, *[3] * 5, 6]
    assert blocks.segment_ids[0].tolist() == [1, 1, 3, 3, 0, 0]
    assert blocks.index[0].tolist()[:4] == [0, 1, 0, 1]
    sums = blocks.sums(jnp.arange(20.0)[None, :, None])[0, :, 0]
    assert sums.tolist() == [2 + 3 + 4, 5 + 6 + 7 + 8, 11 + 12 + 13, sum(range(14, 19)), 0, 0]


def layer(**fields) -> SummaryAttention:
    parts = Parts(TinyConfig(**fields), nnx.Rngs(0))
    return SummaryAttention(parts, size=3, window=2, position=RelativeBuckets(8))


def context(segments: np.ndarray, **more) -> Ctx:
    mask_info = MaskInfo.from_segments(segments, causal=False)
    return Ctx(mask_info.q_index, {}, mask_info, **more)


@nnx.jit
def output(module: SummaryAttention, x: jax.Array, ctx: Ctx) -> jax.Array:
    """Return the output of the layer, computed by one program."""
    return module(x, ctx, None, 0)[0]


def attended(module: SummaryAttention, x: jax.Array, segments: np.ndarray) -> jax.Array:
    return output(module, x, context(segments, **tables()))


def tables() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    names = "buckets", "summary_buckets"
    return {name: jnp.asarray(rng.normal(size=(4, 2)), jnp.float32) for name in names}


@pytest.mark.nightly
def test_packed_segment_has_the_numbers_of_the_segment_alone() -> None:
    module, x = layer(), jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 8)), jnp.float32)
    whole = attended(module, x, SEGMENTS)
    for number in (1, 2, 3):
        at = np.flatnonzero(SEGMENTS[0] == number)
        alone = attended(module, x[:, at], np.ones((1, len(at)), int))
        np.testing.assert_allclose(whole[:, at], alone, atol=1e-5)


def test_far_token_reaches_others_only_by_its_summary() -> None:
    module, rng = layer(), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 12, 8)), jnp.float32)
    segments = np.ones((1, 12), int)
    moved = x.at[0, 11].add(1.0).at[0, 10].add(-1.0)  # the sum of their block is unchanged
    before, after = (attended(module, each, segments) for each in (x, moved))
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-7)
    other = attended(module, x.at[0, 11].add(1.0), segments)
    assert np.abs(before[:, 0] - other[:, 0]).max() > 1e-5


@pytest.mark.nightly
def test_layer_without_table_of_summaries_raises_config_error() -> None:
    ctx = context(np.ones((1, 6), int), buckets=tables()["buckets"])
    with pytest.raises(ConfigError, match=r"the body must set Ctx\.summary_buckets"):
        layer()(jnp.zeros((1, 6, 8)), ctx, None, 0)


def test_selected_mechanism_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="attn_mechanism='vanilla' cannot read summaries"):
        layer(attn_mechanism="vanilla")
