"""Tables of cos and sin equal those that transformers' models compute, for every kind of scaling.

Float32, and so the frequencies must agree to the last bit nearly everywhere: one unit there is an
angle off by 6e-8 times the position. The length runs from far below to beyond what the model was
trained for; `dynamic` and `longrope` change with it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.rope import frequencies as rope
from ed_infra.rope.rotation import axis_of_frequency
from ed_infra.testing import require_torch

HEAD_DIM, TRAINED = 64, 512
BASE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, DeepSeek": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
        **ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + 0.05 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [2 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "factor": 4.0,
        **ORIGINAL,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
LENGTHS = {"below": 300, "between": 1500, "beyond": 6000}


def parameters(kind: str, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **KINDS[kind]}


def theirs_of(module: Any, positions: np.ndarray, *layer_type: str) -> tuple[np.ndarray, ...]:
    """cos and sin [..., r] of a rotary module of transformers."""
    torch = require_torch()
    x = torch.zeros(1, dtype=torch.float32)
    with torch.no_grad():
        cos, sin = module(x, torch.tensor(positions), *layer_type)
    return cos.numpy(), sin.numpy()


@pytest.mark.torch
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.proves("get_basic_rope", "get_basic_rope(head_size)", "get_basic_rope(dtype)")
def test_rope_tables_match_transformers(kind: str, length: int, theta: float, record_property):
    require_torch()
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
        HunYuanDenseV1RotaryEmbedding,
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**BASE, rope_parameters=parameters(kind, theta))
    module = LlamaRotaryEmbedding(config)
    if "alpha" in kind:  # only the families of Hunyuan know it
        hunyuan = transformers.HunYuanDenseV1Config(**BASE, rope_parameters=parameters(kind, theta))
        module = HunYuanDenseV1RotaryEmbedding(hunyuan)
    if kind == "partial":  # a family's own affair there; the kinds in their table know it
        half = transformers.LlamaConfig(
            **{**BASE, "head_dim": HEAD_DIM // 2}, rope_parameters=parameters("default", theta)
        )
        module = LlamaRotaryEmbedding(half)
    cos, sin = theirs_of(module, np.arange(length)[None])
    ours = EasyDeLBaseConfig(**BASE, rope_parameters=parameters(kind, theta))
    our_sin, our_cos = ours.get_basic_rope(jnp.float32, HEAD_DIM, max_position_embeddings=length)
    half_width = our_cos.shape[-1]
    assert cos.shape[-1] == 2 * half_width
    worst = 0.0
    for mine, other in ((our_cos, cos[0]), (our_sin, sin[0])):
        for part in (other[:, :half_width], other[:, half_width:]):
            worst = max(worst, float(np.abs(np.asarray(mine) - part).max()))
    assert worst <= 1e-6, worst


@pytest.mark.torch
@pytest.mark.parametrize("length", [300, 6000])
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_parameters_for_each_layer_type(layer_type: str, length: int):
    require_torch()
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = transformers.Gemma3TextConfig(
        **BASE, num_hidden_layers=6, rope_parameters={k: dict(v) for k, v in nested.items()}
    )
    cos, sin = theirs_of(Gemma3RotaryEmbedding(config), np.arange(length)[None], layer_type)
    ours = EasyDeLBaseConfig(**BASE, rope_parameters=nested)
    table = ours.get_basic_frequencies(max_position_embeddings=length, layer_type=layer_type)
    table = np.asarray(table)
    half = HEAD_DIM // 2
    np.testing.assert_allclose(table[:, :half], cos[0][:, :half], atol=1e-6)
    np.testing.assert_allclose(table[:, half:], sin[0][:, :half], atol=1e-6)
    with pytest.raises(ConfigError, match="layer type of rope_parameters 'full'"):
        ours.get_basic_frequencies(layer_type="full")


def image_positions(length: int) -> np.ndarray:
    """Time, height and width of text, an image of 5 x 7, and text again: [3, 1, length]."""
    text = np.arange(length)
    positions = np.stack([text, text, text])
    rows, columns = np.divmod(np.arange(35), 7)
    positions[:, 4:39] = 4 + np.stack([np.zeros(35, int), rows, columns])
    positions[:, 39:] -= 28
    return positions[:, None]


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("length", [200, 6000])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
@pytest.mark.proves("get_basic_rope(is_neox_style)")
def test_multimodal_rope_sections_match_transformers(family: str, length: int):
    torch = require_torch()
    from transformers.models.glm4v import modeling_glm4v
    from transformers.models.qwen2_vl import modeling_qwen2_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    module, classes = {
        "qwen2_vl": (modeling_qwen2_vl, (transformers.Qwen2VLTextConfig, "Qwen2VLRotaryEmbedding")),
        "qwen3_vl": (
            modeling_qwen3_vl,
            (transformers.Qwen3VLTextConfig, "Qwen3VLTextRotaryEmbedding"),
        ),
        "glm4v": (modeling_glm4v, (transformers.Glm4vTextConfig, "Glm4vTextRotaryEmbedding")),
    }[family]
    sections = {"mrope_section": [8, 12, 12]}
    if family == "qwen3_vl":
        sections["mrope_interleaved"] = True
    rope_parameters = {"rope_type": "default", "rope_theta": 1e6, **sections}
    config = classes[0](**BASE, num_key_value_heads=2, rope_parameters=dict(rope_parameters))
    positions = image_positions(length)
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(1, h, length, HEAD_DIM)).astype(np.float32) for h in (4, 2))
    cos, sin = theirs_of(getattr(module, classes[1])(config), positions)
    theirs = module.apply_rotary_pos_emb(
        torch.tensor(q), torch.tensor(k), torch.tensor(cos), torch.tensor(sin)
    )
    ours = EasyDeLBaseConfig(**BASE, rope_parameters=rope_parameters).get_basic_rope(
        jnp.float32, HEAD_DIM, is_neox_style=family != "glm4v"
    )
    turned = ours(q.swapaxes(1, 2), k.swapaxes(1, 2), positions)
    for mine, other in zip(turned, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine).swapaxes(1, 2), other.numpy(), atol=4e-6)
    text = np.broadcast_to(np.arange(length), (3, 1, length))  # text: as one axis
    np.testing.assert_array_equal(
        ours(q.swapaxes(1, 2), k.swapaxes(1, 2), text)[0],
        ours(q.swapaxes(1, 2), k.swapaxes(1, 2), text[0])[0],
    )


def test_rope_sections_must_sum_to_frequency_count():
    with pytest.raises(ConfigError, match="adds up to 30, but there are 32"):
        axis_of_frequency([10, 10, 10], 32)
    assert list(axis_of_frequency([2, 1, 1], 4)) == [0, 0, 1, 2]
    assert list(axis_of_frequency([4, 2, 2], 8, interleaved=True)) == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("default", "partial")])
def test_legacy_rope_fields_produce_same_frequencies(kind: str):
    """Older keys: `rope_theta`, `rope_scaling: {type: ...}`, `partial_rotary_factor`."""
    new = rope.inv_frequencies(
        EasyDeLBaseConfig(**BASE, rope_parameters=parameters(kind, 7e4)), seq_len=3000
    )
    scaling = dict(KINDS[kind])
    scaling["type"] = scaling.pop("rope_type")
    old = rope.inv_frequencies(
        EasyDeLBaseConfig(**BASE, rope_theta=7e4, rope_scaling=scaling), seq_len=3000
    )
    np.testing.assert_array_equal(old[0], new[0])
    assert old[1] == new[1]


AROUND = [0, 1, 300, TRAINED - 1, TRAINED, TRAINED + 1, 2047, 2048, 2049, 6000, 131_072]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_of_each_length_as_a_traced_function(kind: str, theta: float):
    config = EasyDeLBaseConfig(**BASE, rope_parameters=parameters(kind, theta))
    settings = rope.settings(config)
    lengths = jnp.asarray([*AROUND, 7], jnp.int32).reshape(2, -1)
    _, scaling = rope.inv_frequencies_at(settings, lengths)
    ours = jax.jit(lambda n: rope.inv_frequencies_at(settings, n)[0])(lengths)
    assert ours.dtype == jnp.float32
    expected = [rope.inv_frequencies(settings, seq_len=n) for n in [*AROUND, 7]]
    assert {factor for _, factor in expected} == {scaling}
    table = np.stack([frequencies for frequencies, _ in expected])
    np.testing.assert_allclose(ours.reshape(table.shape), table, rtol=1e-6, atol=0)
    within = np.asarray(ours)[np.asarray(lengths) <= TRAINED]
    np.testing.assert_array_equal(within, np.broadcast_to(table[0], within.shape))
    changes = len({frequencies.tobytes() for frequencies, _ in expected}) > 1
    assert rope.depends_on_length(settings) == changes == (kind in ("dynamic", "longrope"))
    assert rope.depends_on_length(config) == changes


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_of_each_length_equal_transformers(kind: str):
    torch = require_torch()
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**BASE, rope_parameters=parameters(kind))
    ours, scaling = rope.inv_frequencies_at(rope.settings(config), jnp.asarray(AROUND[1:]))
    for length, frequencies in zip(AROUND[1:], np.asarray(ours), strict=True):
        module = LlamaRotaryEmbedding(config)  # a fresh one: theirs remembers the greatest length
        module(torch.zeros(1), torch.tensor([[length - 1]]))
        np.testing.assert_allclose(frequencies, module.inv_freq.numpy(), rtol=1e-6, atol=0)
        assert scaling == pytest.approx(float(module.attention_scaling), rel=1e-12)


def test_prompts_of_one_length_class_have_equal_factors():
    dynamic, longrope, yarn = (
        rope.settings(EasyDeLBaseConfig(**BASE, rope_parameters=parameters(kind)))
        for kind in ("dynamic", "longrope", "yarn")
    )
    assert [rope.length_class(dynamic, n) for n in (1, 2048, 2049, 3000)] == [0, 0, 2049, 3000]
    assert [rope.length_class(longrope, n) for n in (1, 512, 513, 3000)] == [0, 0, 1, 1]
    assert [rope.length_class(yarn, n) for n in (1, 10_000)] == [0, 0]
    for s in (dynamic, longrope, yarn):
        seen: dict[int, np.ndarray] = {}
        for n in AROUND[1:]:
            frequencies, _ = rope.inv_frequencies(s, seq_len=n)
            first = seen.setdefault(rope.length_class(s, n), frequencies)
            np.testing.assert_array_equal(first, frequencies)
