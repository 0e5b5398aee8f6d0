"""Decoders whose configuration makes them encoders: GTE-Qwen's and EmbeddingGemma's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM, AutoEasyDeLModelForEmbedding
from ed_models.conformance import ONE, TINY

IDS = np.random.default_rng(0).integers(3, 160, (3, 24)).astype(np.int32)
MASK = np.asarray([[1] * 24, [1] * 9 + [0] * 15, [1] * 17 + [0] * 7], np.int32)
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"is_causal": False},
    "llama": {"is_causal": False},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 8, "head_dim": 8},
}


def saved(model_type: str, folder: Path) -> Any:
    """Save a body of transformers with random weights, and return the body."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **CASES[model_type]})
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(float("norm" in name and model_type != "gemma3_text"), 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.torch
@pytest.mark.daily("llama")
@pytest.mark.parametrize("model_type", CASES)
def test_bidirectional_decoder_embeds_like_transformers(model_type: str, tmp_path: Path) -> None:
    theirs = saved(model_type, tmp_path)
    import torch

    model = AutoEasyDeLModelForEmbedding.from_pretrained(tmp_path, sharding_axis_dims=ONE)
    got = np.asarray(model(IDS, attention_mask=MASK).last_hidden_state)
    with torch.no_grad():
        ids, mask = (torch.tensor(x, dtype=torch.long) for x in (IDS, MASK))
        expected = theirs(ids, attention_mask=mask).last_hidden_state.numpy()
    real = MASK != 0
    np.testing.assert_allclose(got[real], expected[real], atol=1e-4)
    # The first token reads later ones.
    changed = IDS.copy()
    changed[0, 5] = (changed[0, 5] + 1) % 160
    other = np.asarray(model(changed, attention_mask=MASK).last_hidden_state)
    assert np.abs(other[0, 0] - got[0, 0]).max() > 1e-4
    model.save_pretrained(tmp_path / "again")
    import transformers

    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        repeated = again(ids, attention_mask=mask).last_hidden_state.numpy()
    np.testing.assert_allclose(repeated[real], expected[real], atol=1e-6)


def test_bidirectional_decoder_does_not_generate() -> None:
    config = AutoEasyDeLConfig.for_model("qwen2", **TINY, is_causal=False, sharding_axis_dims=ONE)
    model = AutoEasyDeLModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="bidirectional attention needs all tokens"):
        model.generate(IDS[:1], max_new_tokens=2)
