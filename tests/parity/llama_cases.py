"""Tiny random Llamas that torch `transformers` creates and evaluates as references.

Every parameter is random, including norms and biases, so that a tensor that is loaded to a wrong
place, or not loaded, changes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARED = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short: the tests contain later positions
}
CASES: dict[str, dict[str, Any]] = {
    # Grouped queries, head_dim other than hidden / heads, biases, llama3 frequencies, many files.
    "untied": {
        "config": {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3_ROPE,
        },
        "save": {"max_shard_size": "20KB"},
    },
    # Tied head, otherwise like small Llamas, one file.
    "tied": {"config": {"tie_word_embeddings": True}, "save": {}},
    # The file is bfloat16; both sides compute its values in float32.
    "bf16": {"config": {"tie_word_embeddings": False}, "save": {}, "dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Reference:
    """A saved model, and the results of torch.

    Attributes:
        directory: Directory that torch saved.
        ids, mask, position_ids: Batch [b, s], two rows with padding on the left.
        logits: float32 [b, s, v].
        model: Torch module in float32.
    """

    directory: Path
    ids: np.ndarray
    mask: np.ndarray
    position_ids: np.ndarray
    logits: np.ndarray
    model: Any


def make(name: str, directory: Path) -> Reference:
    """Create one case with torch, save it and evaluate it."""
    import torch
    import transformers

    case = CASES[name]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHARED, **case["config"]))
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.2)
    model.to(getattr(torch, case.get("dtype", "float32"))).save_pretrained(
        directory, **case["save"]
    )
    # Loaded again, because the cast above also rounds the rotary frequencies of the module.
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    rng = np.random.default_rng(0)
    ids = rng.integers(3, SHARED["vocab_size"], (4, 48))
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    mask[3, :40] = 0
    position_ids = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return Reference(directory, ids, mask, position_ids, run(model, ids, mask, position_ids), model)


def run(model: Any, ids: np.ndarray, mask: np.ndarray, position_ids: np.ndarray) -> np.ndarray:
    """Return the logits of a torch model, float32 [b, s, v]."""
    import torch

    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(position_ids),
        )
    return out.logits.float().numpy()
