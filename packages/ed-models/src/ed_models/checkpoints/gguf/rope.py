"""Rotary positions: `rope_parameters` of Hugging Face, and the metadata and tensors of llama.cpp.

llama.cpp has no Llama 3 scaling: `rope_freqs` contains the divisor of each frequency instead, which
is what "longrope" of Hugging Face describes too. `rope_factors_long` and `rope_factors_short` are
the two lists of Phi-3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ed_models.checkpoints.gguf.architecture import FileReading, FileWriting

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
#: Tensors that describe positions and are no parameters.
TENSORS = (FREQUENCIES, LONG, SHORT)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def read_rope(reading: FileReading, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of the model in a file.

    Args:
        reading: the file.
        head_dim: size of a head.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = float(reading.get("rope.freq_base", 10_000.0))
    rotated = reading.get("rope.dimension_count")
    if rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = reading.get("rope.scaling.type", "none")
    factor = reading.get("rope.scaling.factor")
    original = reading.get("rope.scaling.original_context_length")
    if reading.has(FREQUENCIES):
        context = reading.get("context_length")
        return rope | _read_divisors(np.asarray(reading.values(FREQUENCIES)), rope, context)
    if reading.has(LONG):
        rope |= {
            "rope_type": "longrope",
            "long_factor": np.asarray(reading.values(LONG), np.float32).tolist(),
            "short_factor": np.asarray(reading.values(SHORT), np.float32).tolist(),
        }
        if original:
            rope["original_max_position_embeddings"] = original
        attention = reading.get("rope.scaling.attn_factor")
        usual = longrope_factor(reading.get("context_length", original), original)
        if attention is not None and not math.isclose(attention, usual, rel_tol=1e-5):
            rope["attention_factor"] = attention
        return rope
    if kind in ("linear", "yarn") and factor:
        rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        yarn_values = {name: reading.get(key) for name, key in _YARN.items()}
        rope |= {name: value for name, value in yarn_values.items() if value is not None}
        if original:
            rope["original_max_position_embeddings"] = original
    return rope


def write_rope(writing: FileWriting, rope: Mapping[str, Any], head_dim: int) -> None:
    """Add the metadata and the tensors of `rope_parameters` of one kind of layers."""
    kind = rope.get("rope_type", "default")
    theta = rope.get("rope_theta") or 10_000.0
    writing.set("rope.freq_base", float(theta))
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    writing.set("rope.dimension_count", rotated)
    if kind in ("linear", "yarn"):
        writing.set("rope.scaling.type", kind)
        writing.set("rope.scaling.factor", float(rope["factor"]))
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn":
        default = getattr(writing.config, "max_position_embeddings", None)
        writing.set("rope.scaling.original_context_length", original or default)
        for name, key in _YARN.items():
            value = rope.get(name)
            writing.set(key, None if value is None else float(value))
    elif kind == "longrope":
        writing.set("rope.scaling.type", kind)
        writing.set("rope.scaling.original_context_length", original)
        writing.tensors[LONG] = np.asarray(rope["long_factor"], np.float32)
        writing.tensors[SHORT] = np.asarray(rope["short_factor"], np.float32)
        context = writing.config.max_position_embeddings
        factor = rope.get("attention_factor") or longrope_factor(context, original)
        writing.set("rope.scaling.attn_factor", float(factor))
    elif kind == "llama3":
        writing.tensors[FREQUENCIES] = llama3_divisors(rope, rotated)


def longrope_factor(context: int, original: int | None) -> float:
    """Return the factor of queries and keys that "longrope" derives from two lengths."""
    scale = context / (original or context)
    return math.sqrt(1 + math.log(scale) / math.log(original)) if original and scale > 1 else 1.0


def llama3_divisors(rope: Mapping[str, Any], rotated: int) -> np.ndarray:
    """Return the divisor of each frequency by Llama 3's scaling, float32 [rotated / 2]."""
    theta, factor = float(rope.get("rope_theta") or 10_000.0), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = rope["original_max_position_embeddings"]
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    lengths = 2 * np.pi * np.float64(theta) ** exponents.astype(np.float64)
    smooth = (original / lengths - low) / ((high - low) or 1.0)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(lengths > original / low, factor, between)
    return np.where(lengths < original / high, 1.0, divisors).astype(np.float32)


def _read_divisors(
    divisors: np.ndarray, rope: Mapping[str, Any], context: int | None
) -> dict[str, Any]:
    """Return Llama 3's parameters if they give these divisors, otherwise the divisors."""
    divisors = divisors.astype(np.float32).reshape(-1)
    if not divisors.size or (divisors == 1).all():
        return {}
    factor = float(divisors.max())
    for original in (2**n for n in range(4, 21)):
        guess = {"factor": factor, "original_max_position_embeddings": original, **_LLAMA3}
        if np.allclose(llama3_divisors({**rope, **guess}, 2 * len(divisors)), divisors, 1e-5, 0):
            return {"rope_type": "llama3", **guess}
    listed = divisors.tolist()
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
        "short_factor": listed,
        "long_factor": listed,
    }
