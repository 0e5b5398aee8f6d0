"""The GGUF file of a checkpoint contains the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from tools.bench import llama_cpp

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5e5},
    "vocab_size": 300,
}
LAYER = "model.layers.0"


def save(folder: Path, vocab: int) -> Path:
    """Write a checkpoint with random weights."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab}))
    shapes = {
        "model.embed_tokens.weight": (vocab, 8),
        f"{LAYER}.input_layernorm.weight": (8,),
        f"{LAYER}.self_attn.q_proj.weight": (8, 8),
        f"{LAYER}.self_attn.k_proj.weight": (4, 8),
        f"{LAYER}.self_attn.v_proj.weight": (4, 8),
        f"{LAYER}.self_attn.o_proj.weight": (8, 8),
        f"{LAYER}.post_attention_layernorm.weight": (8,),
        f"{LAYER}.mlp.gate_proj.weight": (12, 8),
        f"{LAYER}.mlp.up_proj.weight": (12, 8),
        f"{LAYER}.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
        "lm_head.weight": (vocab, 8),
    }
    draw = np.random.default_rng(0).normal
    tensors = {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path, 300)


def read(checkpoint: Path, dtype: str) -> tuple[GGUFReader, dict[str, np.ndarray]]:
    path = checkpoint / "model.gguf"
    llama_cpp.write_gguf(checkpoint, path, dtype)
    reader = GGUFReader(path)
    return reader, {t.name: t.data for t in reader.tensors}


def turned(x: np.ndarray, position: float, frequencies: np.ndarray, pairs: slice) -> np.ndarray:
    """Rotate the two numbers of every pair; `pairs` selects the first number of each pair."""
    angle = position * frequencies
    other = slice(1, None, 2) if pairs.step else slice(len(x) // 2, None)
    out = x.copy()
    out[pairs] = x[pairs] * np.cos(angle) - x[other] * np.sin(angle)
    out[other] = x[other] * np.cos(angle) + x[pairs] * np.sin(angle)
    return out


def test_converted_projections_have_same_scores_after_rotation(checkpoint: Path) -> None:
    before = load_file(checkpoint / "model.safetensors")
    _, after = read(checkpoint, "f32")
    x, frequencies = np.random.default_rng(1).normal(size=8), np.array([1.0, 0.1])

    def score(q: np.ndarray, k: np.ndarray, pairs: slice) -> list[float]:
        keys = turned(k @ x, 2.0, frequencies, pairs)
        return [float(turned(h, 7.0, frequencies, pairs) @ keys) for h in (q @ x).reshape(2, 4)]

    q, k = (before[f"{LAYER}.self_attn.{name}.weight"] for name in ("q_proj", "k_proj"))
    expected = score(q, k, slice(0, 2))
    found = score(after["blk.0.attn_q.weight"], after["blk.0.attn_k.weight"], slice(0, None, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    down = before[f"{LAYER}.mlp.down_proj.weight"]
    np.testing.assert_array_equal(after["blk.0.ffn_down.weight"], down)


def test_converted_gguf_has_sizes_tokens_and_dtypes(checkpoint: Path) -> None:
    reader, tensors = read(checkpoint, "bf16")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.block_count"] == 1
    assert fields["llama.rope.dimension_count"] == 4
    assert fields["llama.rope.freq_base"] == 5e5
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert len(fields["tokenizer.ggml.tokens"]) == fields["llama.vocab_size"] == 300
    assert len(fields["tokenizer.ggml.scores"]) == len(fields["tokenizer.ggml.token_type"]) == 300
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"BF16"}
    assert set(tensors) > {"token_embd.weight", "blk.0.attn_q.weight"}


def test_vocabulary_without_room_for_the_bytes_raises_value_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a vocabulary of 258 is too small: it needs at least 259"
    ):
        llama_cpp.write_gguf(save(tmp_path, 258), tmp_path / "model.gguf", "f32")
