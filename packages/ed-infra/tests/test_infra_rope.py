"""Rotary frequencies equal those of transformers, and rotations have the expected properties."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.rope import frequencies as rope
from ed_infra.rope import parameters as rope_parameters
from ed_infra.rope import rotation
from ed_infra.testing import require_torch

BASE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
TRAINED = {"original_max_position_embeddings": 1024}
CASES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **TRAINED},
    "yarn with mscale": {
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
        **TRAINED,
    },
    "longrope": {
        "short_factor": [1 + 0.1 * i for i in range(16)],
        "long_factor": [2 + 0.1 * i for i in range(16)],
        **TRAINED,
    },
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "proportional": {"partial_rotary_factor": 0.5},
    "linear in part": {"factor": 2.0, "partial_rotary_factor": 0.25},
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [None, 100, 9000])
def test_rope_frequencies_match_transformers(case: str, length: int | None):
    require_torch()
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = case.split()[0]
    parameters = {"rope_type": kind, "rope_theta": 50_000.0, **CASES[case]}
    config = transformers.LlamaConfig(**BASE, rope_parameters=parameters)
    theirs, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    ours, factor = rope.inv_frequencies(config, seq_len=length)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=3e-7, atol=0)
    assert factor == pytest.approx(scaling, rel=1e-12)


@pytest.mark.torch
def test_plain_frequencies_and_rotation_equal_transformers():
    torch = require_torch()
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(**BASE)
    table = modeling_llama.LlamaRotaryEmbedding(config)
    positions = np.array([[0, 1, 5, 4000]])
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(1, h, 4, 32)).astype(np.float32) for h in (4, 2))
    cos, sin = table(torch.tensor(q), torch.tensor(positions))
    theirs = modeling_llama.apply_rotary_pos_emb(torch.tensor(q), torch.tensor(k), cos, sin)
    turn = EasyDeLBaseConfig(**BASE).get_basic_rope(jnp.float32, 32)
    ours = turn(q.swapaxes(1, 2), k.swapaxes(1, 2), positions)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a).swapaxes(1, 2), b.numpy(), atol=2e-6)


def test_old_spellings_give_the_same():
    new = {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}
    old = {"type": "linear", "factor": 2.0}
    expected = rope.inv_frequencies(new, 8)[0]
    assert rope_parameters.standard_parameters(old, rope_theta=5.0) == new
    config = EasyDeLBaseConfig(head_dim=8, rope_theta=5.0, rope_scaling=old)
    np.testing.assert_array_equal(rope.inv_frequencies(config)[0], expected)


def test_rope_parameters_are_selected_by_layer_type():
    nested = {"full_attention": {"rope_theta": 10.0}, "sliding_attention": {"rope_theta": 20.0}}
    full = rope.inv_frequencies(nested, 8, layer_type="full_attention")[0]
    assert full[1] == pytest.approx(10.0 ** (-2 / 8))
    with pytest.raises(ConfigError, match="unknown layer type"):
        rope.inv_frequencies(nested, 8, layer_type="full")


def test_invalid_rope_parameters_raise_config_error():
    with pytest.raises(ConfigError, match="unknown rope_type 'lama3'; did you mean 'llama3'"):
        rope.inv_frequencies({"rope_type": "lama3"}, 8)
    with pytest.raises(ConfigError, match="'llama3' need 'factor'"):
        rope.inv_frequencies({"rope_type": "llama3"}, 8)
    with pytest.raises(ConfigError, match="head_dim"):
        rope.inv_frequencies({})
    with pytest.raises(ConfigError, match="3 values for 4"):
        rope.inv_frequencies(
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1, 1, 1], **TRAINED}, 8
        )


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_lengths_and_depends_on_distance_only(interleaved: bool):
    random = np.random.default_rng(1)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    table = rotation.RotaryTable(rope.inv_frequencies({}, 8)[0], interleaved=interleaved)  # r < k

    def score(i: int, j: int) -> float:
        a, _ = table(q, k, jnp.array([[i]]))
        _, b = table(q, k, jnp.array([[j]]))
        np.testing.assert_allclose(jnp.linalg.norm(a), jnp.linalg.norm(q), rtol=1e-6)
        np.testing.assert_array_equal(a[..., 8:], q[..., 8:])
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-4)


def test_the_methods_of_a_configuration():
    config = EasyDeLBaseConfig(**BASE)
    table = config.get_basic_frequencies(
        head_size=128, rotary_dim=128, base=10_000.0, max_position_embeddings=16
    )
    sin, cos = config.get_basic_rope(
        dtype=jnp.float32, head_size=128, rotary_dim=128, max_position_embeddings=16
    )
    assert table.shape == (16, 128)
    assert sin.shape == cos.shape == (16, 64)
    np.testing.assert_array_equal(table, jnp.concatenate([cos, sin], axis=-1))
    np.testing.assert_allclose(sin**2 + cos**2, 1.0, rtol=1e-6)
    assert config.get_basic_inv_frequencies(partial_rotary_factor=0.5).shape == (8,)
    assert config.granted_freq_max_position_embedding == 4096
    config.freq_max_position_embeddings = 32
    assert config.get_basic_frequencies().shape == (32, 32)
