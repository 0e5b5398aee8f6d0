"""Frequencies of rotary position embeddings for every rope type.

The formulas equal those of `transformers/modeling_rope_utils.py`, and tests compare the results.
`ed_infra.rope.rotation` computes tables from the frequencies.

Shapes: `k` head dimension, `r` rotary dimension (`r <= k`), `r2` = r / 2, `p` any leading
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ed_infra.errors import ConfigError, unknown_name
from ed_infra.rope.parameters import RopeSettings, settings


def _periods(theta: float, dim: int) -> np.ndarray:
    """Return theta^(2i/dim), float32 [dim / 2]: positions per radian.

    The power is computed in float64 and rounded. numpy's float32 power is wrong in the last bit for
    one frequency in four, which changes the angle at position 100 000 by 0.01.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _compute_frequencies(theta: float, dim: int) -> np.ndarray:
    """Frequencies without scaling: theta^(-2i/dim), float32 [dim / 2] (Su et al., 2021)."""
    return np.float32(1.0) / _periods(theta, dim)


def _default(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    return _compute_frequencies(s.theta, s.rotary_dim), 1.0


def _linear(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al., 2023): positions are divided by `factor`."""
    return _compute_frequencies(s.theta, s.rotary_dim) / np.float32(s.need("factor")), 1.0


def _dynamic(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Dynamic NTK: the base grows with the length, beyond the trained length; `alpha` is a growth
    for all lengths (Hunyuan)."""
    dim, alpha = s.rotary_dim, s.get("alpha")
    if alpha is not None:
        return _compute_frequencies(s.theta * alpha ** (dim / (dim - 2)), dim), 1.0
    trained = trained_length(s)
    factor = float(s.need("factor"))
    reach = factor * max(length or trained, trained) / trained - (factor - 1)
    return _compute_frequencies(s.theta * reach ** (dim / (dim - 2)), dim), 1.0


def _yarn(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023): slow dimensions are interpolated, fast ones are not."""
    dim, theta = s.rotary_dim, s.theta
    trained = s.need("original_max_position_embeddings")
    factor = s.get("factor")
    if factor is None:
        if s.max_position_embeddings is None:
            raise ConfigError("rope_type 'yarn' needs factor, or max_position_embeddings")
        factor = s.max_position_embeddings / trained

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention = s.get("attention_factor")
    if attention is None:
        m, m_all = s.get("mscale"), s.get("mscale_all_dim")
        attention = scale(m) / scale(m_all) if m and m_all else scale()

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(s.get("beta_fast") or 32)
    high = dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    extrapolation_weight = 1 - np.clip(
        (np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1
    )
    periods = _periods(theta, dim)
    blended = (
        1 / (factor * periods) * (1 - extrapolation_weight) + 1 / periods * extrapolation_weight
    )
    return blended.astype(np.float32), float(attention)


def _longrope(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al., 2024): one factor for each dimension, another set beyond training."""
    trained = s.need("original_max_position_embeddings")
    factor = s.get("factor")
    if factor is None:
        if s.max_position_embeddings is None:
            raise ConfigError("rope_type 'longrope' needs factor, or max_position_embeddings")
        factor = s.max_position_embeddings / trained
    attention = s.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    name = "long_factor" if length and length > trained else "short_factor"
    factors = np.asarray(s.need(name), np.float32)
    periods = _periods(s.theta, s.rotary_dim)
    if factors.shape != periods.shape:
        raise ConfigError(f"{name} has {factors.size} values for {periods.size} frequencies")
    return 1 / (factors * periods), float(attention)


def _llama3(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, others blended."""
    factor, trained = s.need("factor"), s.need("original_max_position_embeddings")
    low, high = s.need("low_freq_factor"), s.need("high_freq_factor")
    frequencies = _compute_frequencies(s.theta, s.rotary_dim)
    # Reciprocals, then products: torch divides a number by a tensor so.
    wavelength = (1 / frequencies) * np.float32(2 * math.pi)
    smooth = ((1 / wavelength) * trained - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelength > trained / low, frequencies / factor, frequencies)
    middle = (wavelength >= trained / high) & (wavelength <= trained / low)
    return np.where(middle, blended, scaled).astype(np.float32), 1.0


def _proportional(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Gemma 4: rotate a part of the dimensions, with the frequencies of the whole head."""
    turning = int(s.get("partial_rotary_factor", 1.0) * s.head_dim // 2)
    frequencies = _compute_frequencies(s.theta, s.head_dim)
    still = np.arange(s.head_dim // 2) >= turning
    return np.where(still, 0.0, frequencies / s.get("factor", 1.0)).astype(np.float32), 1.0


def _axial(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Images of Qwen2-VL: half of the frequencies rotate by the row, the others by the column."""
    return np.tile(_compute_frequencies(s.theta, s.rotary_dim // 2), 2), 1.0


#: Rope type -> its formula; `READS` of `ed_infra.rope.parameters` lists the parameters.
ROPE_TYPES: dict[str, Callable[[RopeSettings, int | None], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "axial": _axial,
}


def _get_settings(
    config: object, head_dim: int | None = None, layer_type: str | None = None
) -> RopeSettings:
    """Return the settings of a configuration, a mapping or settings, with a known rope type."""
    if not isinstance(config, RopeSettings):
        config = settings(config, head_dim, layer_type)
    if config.rope_type not in ROPE_TYPES:
        raise unknown_name("rope_type", config.rope_type, ROPE_TYPES)
    return config


def inv_frequencies(
    config: object,
    head_dim: int | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Float[np.ndarray, ...], float]:
    """Return the inverse frequencies and the factor of cos and sin.

    Args:
        config: A configuration, a mapping of rope parameters, or `RopeSettings`.
        head_dim: k; the default is the head dimension of the configuration.
        seq_len: Largest sequence length, for `dynamic` and `longrope`; None = the trained length.
        layer_type: Layer type, if `rope_parameters` has an entry for each one.

    Returns:
        float32 [r / 2] ([k / 2] for `proportional`) and a float.

    Raises:
        ConfigError: The rope type is unknown, or a parameter is missing.
    """
    s = _get_settings(config, head_dim, layer_type)
    frequencies, attention = ROPE_TYPES[s.rope_type](s, seq_len)
    return np.asarray(frequencies, np.float32), float(attention)


def depends_on_length(config: object) -> bool:
    """Return whether the rotary factors depend on the length of a sequence.

    Args:
        config: A configuration, a mapping of rope parameters, or `RopeSettings`.
    """
    s = _get_settings(config)
    return s.rope_type in ("dynamic", "longrope") and s.get("alpha") is None


def trained_length(config: object) -> int:
    """Return the length up to which the rotary factors equal those of training.

    As in transformers, `dynamic` uses `max_position_embeddings`, and `longrope` uses
    `original_max_position_embeddings`.

    Raises:
        ConfigError: The configuration does not define the length.
    """
    s = _get_settings(config)
    if s.rope_type != "dynamic":
        return s.need("original_max_position_embeddings")
    if s.max_position_embeddings is None:
        raise ConfigError("rope_type 'dynamic' needs max_position_embeddings")
    return s.max_position_embeddings


def length_class(config: object, prompt_len: int) -> int:
    """Return the class of a prompt length; prompts of one class have equal rotary factors.

    Prompts of one class can share keys and values. The class is 0 up to the trained length, and for
    rope types that do not depend on the length. Beyond the trained length, the class is 1 for
    `longrope`, which has two sets of factors, and the length for `dynamic`.

    Args:
        config: A configuration, a mapping of rope parameters, or `RopeSettings`.
        prompt_len: Tokens of the prompt.
    """
    s = _get_settings(config)
    if not depends_on_length(s) or prompt_len <= trained_length(s):
        return 0
    return 1 if s.rope_type == "longrope" else prompt_len


def inv_frequencies_at(
    config: object, lengths: Int[jax.Array, "*p"]
) -> tuple[Float[jax.Array, "*p r2"], float]:
    """Return the inverse frequencies of tokens in sequences of different lengths.

    The function is traceable. It equals `inv_frequencies(config, seq_len=n)` for each n of
    `lengths` up to 1e-6, and `inv_frequencies(config)` exactly up to the trained length.

    Args:
        config: A configuration, a mapping of rope parameters, or `RopeSettings`.
        lengths: int [*p], the sequence length of each token; 0 = the trained length.

    Returns:
        float32 [*p, r2], and the factor of cos and sin, which does not depend on the length.

    Raises:
        ConfigError: The rope type is unknown, or a parameter is missing.
    """
    s = _get_settings(config)
    frequencies, attention = inv_frequencies(s)
    lengths = jnp.asarray(lengths)[..., None]
    if not depends_on_length(s):
        shape = (*lengths.shape[:-1], frequencies.size)
        return jnp.broadcast_to(jnp.asarray(frequencies), shape), attention
    trained = trained_length(s)
    if s.rope_type == "longrope":
        long_frequencies, _ = inv_frequencies(s, seq_len=trained + 1)
        return jnp.where(lengths > trained, long_frequencies, frequencies), attention
    # (theta g)^(-2i/r) = theta^(-2i/r) g^(-2i/r), with g = 1 at the trained length. `log1p` of the
    # excess over this length keeps digits that g would lose.
    r = s.rotary_dim
    exponents = np.arange(0, r, 2, dtype=np.float64) / (r - 2)
    excess = jnp.maximum(lengths - trained, 0).astype(jnp.float32)
    growth = jnp.log1p(excess * np.float32(float(s.need("factor")) / trained))
    return jnp.exp(-growth * exponents.astype(np.float32)) * frequencies, attention
