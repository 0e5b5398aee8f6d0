"""Rotary position embeddings: inverse frequencies of every scaling, and the tables they make.

The formulas are those of `transformers/modeling_rope_utils.py`, and the results are compared with
them in the tests. Shapes: `k` head dimension, `r` rotary dimension (`r <= k`), `r2` = r / 2,
`s` positions, `h` query heads, `g` key heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ed_infra.errors import ConfigError, unknown_name
from ed_infra.rope_sections import select_axis


@dataclasses.dataclass(frozen=True)
class RopeSettings:
    """What the frequencies of one kind of layer depend on.

    Attributes:
        parameters: Hugging Face's `rope_parameters` of the layer kind, new spellings.
        head_dim: k.
        max_position_embeddings: positions that the model was configured for, or None.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int | None = None

    @property
    def rope_type(self) -> str:
        """Kind of scaling: a key of `ROPE_TYPES`."""
        return self.parameters.get("rope_type", "default")

    @property
    def theta(self) -> float:
        """Base of the frequencies."""
        return float(self.parameters.get("rope_theta") or 10_000.0)

    @property
    def rotary_dim(self) -> int:
        """r: how many of the k dimensions turn."""
        return int(self.head_dim * (self.parameters.get("partial_rotary_factor") or 1.0))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or `default` where it is missing or None."""
        value = self.parameters.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a parameter that this kind of scaling cannot do without."""
        value = self.parameters.get(name)
        if value is None and name == "original_max_position_embeddings":
            value = self.max_position_embeddings
        if value is None:
            raise ConfigError(f"rope_parameters of rope_type {self.rope_type!r} need {name!r}")
        return value


def standard_parameters(
    parameters: Mapping[str, Any] | None,
    *,
    rope_theta: float | None = None,
    partial_rotary_factor: float | None = None,
) -> dict[str, Any]:
    """Return `rope_parameters` in new spelling: `type` becomes `rope_type`, the base goes inside.

    Args:
        parameters: `rope_parameters`, or the `rope_scaling` of an older file, or None.
        rope_theta: base, where the mapping has none.
        partial_rotary_factor: share of dimensions that turn, where the mapping has none.
    """
    result = dict(parameters or {})
    legacy = result.pop("type", None)
    result.setdefault("rope_type", legacy or "default")
    if result["rope_type"] in ("su", "mrope"):  # names in the first Phi-3 and Qwen2-VL files
        result["rope_type"] = {"su": "longrope", "mrope": "default"}[result["rope_type"]]
    if result.get("rope_theta") is None:
        result["rope_theta"] = 10_000.0 if rope_theta is None else rope_theta
    if result.get("partial_rotary_factor") is None and partial_rotary_factor is not None:
        result["partial_rotary_factor"] = partial_rotary_factor
    return result


def settings(
    config: Any, head_dim: int | None = None, layer_type: str | None = None
) -> RopeSettings:
    """Read the settings out of a configuration.

    Args:
        config: a configuration, or a mapping of rope parameters.
        head_dim: k; by default the configuration's, else hidden size over heads.
        layer_type: which entry, where `rope_parameters` has one for each layer type.

    Raises:
        ConfigError: the head dimension or the layer type cannot be found.
    """
    if isinstance(config, Mapping):
        parameters, positions = config, config.get("max_position_embeddings")
    else:
        parameters = getattr(config, "rope_parameters", None) or {}
        positions = getattr(config, "max_position_embeddings", None)
        head_dim = head_dim or getattr(config, "head_dim", None)
        if head_dim is None and getattr(config, "hidden_size", None):
            head_dim = config.hidden_size // config.num_attention_heads
    if head_dim is None:
        raise ConfigError("rotary embeddings need head_dim, or hidden_size and num_attention_heads")
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if nested:
        if layer_type not in nested:
            raise unknown_name("layer type of rope_parameters", layer_type, nested)
        parameters = nested[layer_type]
    standard = standard_parameters(
        parameters,
        rope_theta=getattr(config, "rope_theta", None),
        partial_rotary_factor=getattr(config, "partial_rotary_factor", None),
    )
    return RopeSettings(standard, head_dim, positions)


def _periods(theta: float, dim: int) -> np.ndarray:
    """theta^(2i/dim), float32 [dim / 2]: positions per radian.

    The power is rounded from float64: numpy's own float32 power is off in the last bit for one
    frequency in four, which at position 100 000 is an angle off by 0.01.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _plain(theta: float, dim: int) -> np.ndarray:
    """Frequencies without scaling: theta^(-2i/dim), float32 [dim / 2] (Su et al., 2021)."""
    return np.float32(1.0) / _periods(theta, dim)


def _default(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    return _plain(s.theta, s.rotary_dim), 1.0


def _linear(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al., 2023): positions are divided by `factor`."""
    return _plain(s.theta, s.rotary_dim) / np.float32(s.need("factor")), 1.0


def _dynamic(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Dynamic NTK: the base grows with the length beyond what the model was trained for."""
    trained = trained_length(s)
    factor, dim = float(s.need("factor")), s.rotary_dim
    reach = factor * max(length or trained, trained) / trained - (factor - 1)
    return _plain(s.theta * reach ** (dim / (dim - 2)), dim), 1.0


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
    kept = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    periods = _periods(theta, dim)
    blended = 1 / (factor * periods) * (1 - kept) + 1 / periods * kept
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
    plain = _plain(s.theta, s.rotary_dim)
    # Reciprocals, then products: what torch makes of a number over a tensor.
    wavelength = (1 / plain) * np.float32(2 * math.pi)
    smooth = ((1 / wavelength) * trained - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > trained / low, plain / factor, plain)
    middle = (wavelength >= trained / high) & (wavelength <= trained / low)
    return np.where(middle, blended, scaled).astype(np.float32), 1.0


def _proportional(s: RopeSettings, length: int | None) -> tuple[np.ndarray, float]:
    """Gemma 4: a share of the dimensions turns, at the pace of the whole head; the rest stand."""
    turning = int(s.get("partial_rotary_factor", 1.0) * s.head_dim // 2)
    plain = _plain(s.theta, s.head_dim)
    still = np.arange(s.head_dim // 2) >= turning
    return np.where(still, 0.0, plain / s.get("factor", 1.0)).astype(np.float32), 1.0


#: Kind of scaling -> its formula.
ROPE_TYPES: dict[str, Callable[[RopeSettings, int | None], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def _settings_of(
    config: Any, head_dim: int | None = None, layer_type: str | None = None
) -> RopeSettings:
    """Return the settings of a configuration, a mapping or settings, of a kind that is known."""
    if not isinstance(config, RopeSettings):
        config = settings(config, head_dim, layer_type)
    if config.rope_type not in ROPE_TYPES:
        raise unknown_name("rope_type", config.rope_type, ROPE_TYPES)
    return config


def inv_frequencies(
    config: Any,
    head_dim: int | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Float[np.ndarray, ...], float]:
    """Return the inverse frequencies and the factor of cos and sin.

    Args:
        config: a configuration, a mapping of rope parameters, or `RopeSettings`.
        head_dim: k; by default the configuration's.
        seq_len: greatest length in view, for `dynamic` and `longrope`; None = the trained one.
        layer_type: which entry, where `rope_parameters` has one for each layer type.

    Returns:
        float32 [r / 2] ([k / 2] for `proportional`) and a float.

    Raises:
        ConfigError: the kind of scaling is unknown, or lacks a parameter.
    """
    s = _settings_of(config, head_dim, layer_type)
    frequencies, attention = ROPE_TYPES[s.rope_type](s, seq_len)
    return np.asarray(frequencies, np.float32), float(attention)


def depends_on_length(config: Any) -> bool:
    """Return whether the rotary factors change with the length of a sequence.

    Args:
        config: a configuration, a mapping of rope parameters, or `RopeSettings`.
    """
    return _settings_of(config).rope_type in ("dynamic", "longrope")


def trained_length(config: Any) -> int:
    """Return the length up to which the rotary factors are those of training.

    `dynamic` reads `max_position_embeddings` for that, `longrope` its
    `original_max_position_embeddings`, both as transformers does.

    Raises:
        ConfigError: the configuration does not say.
    """
    s = _settings_of(config)
    if s.rope_type != "dynamic":
        return s.need("original_max_position_embeddings")
    if s.max_position_embeddings is None:
        raise ConfigError("rope_type 'dynamic' needs max_position_embeddings")
    return s.max_position_embeddings


def length_class(config: Any, prompt_len: int) -> int:
    """Return a number that two prompts share only if their rotary factors are equal.

    Keys and values may be shared between prompts of one class. The class is 0 up to the trained
    length and for every kind of scaling that does not depend on length; beyond that it is 1 for
    `longrope`, which knows two sets of factors, and the length for `dynamic`.

    Args:
        config: a configuration, a mapping of rope parameters, or `RopeSettings`.
        prompt_len: tokens of the prompt.
    """
    s = _settings_of(config)
    if not depends_on_length(s) or prompt_len <= trained_length(s):
        return 0
    return 1 if s.rope_type == "longrope" else prompt_len


def inv_frequencies_at(
    config: Any, lengths: Int[jax.Array, "*p"]
) -> tuple[Float[jax.Array, "*p r2"], float]:
    """Return the inverse frequencies of tokens whose sequences have different lengths.

    It can be traced: `inv_frequencies(config, seq_len=n)` for each n of `lengths`, equal to 1e-6.
    Up to the trained length the values are exactly those of `inv_frequencies(config)`.

    Args:
        config: a configuration, a mapping of rope parameters, or `RopeSettings`.
        lengths: int [*p], the length in view of each token's sequence; 0 = the trained one.

    Returns:
        float32 [*p, r2], and the factor of cos and sin, which no kind of scaling varies by length.

    Raises:
        ConfigError: the kind of scaling is unknown, or lacks a parameter.
    """
    s = _settings_of(config)
    frequencies, attention = inv_frequencies(s)
    lengths = jnp.asarray(lengths)[..., None]
    if not depends_on_length(s):
        shape = (*lengths.shape[:-1], frequencies.size)
        return jnp.broadcast_to(jnp.asarray(frequencies), shape), attention
    trained = trained_length(s)
    if s.rope_type == "longrope":
        beyond, _ = inv_frequencies(s, seq_len=trained + 1)
        return jnp.where(lengths > trained, beyond, frequencies), attention
    # (theta g)^(-2i/r) = theta^(-2i/r) g^(-2i/r), with g = 1 at the trained length. `log1p` of what
    # exceeds that length keeps the digits which g itself would lose.
    r = s.rotary_dim
    exponents = np.arange(0, r, 2, dtype=np.float64) / (r - 2)
    excess = jnp.maximum(lengths - trained, 0).astype(jnp.float32)
    growth = jnp.log1p(excess * np.float32(float(s.need("factor")) / trained))
    return jnp.exp(-growth * exponents.astype(np.float32)) * frequencies, attention


def angles(
    positions: Any, frequencies: Any, attention_scaling: float = 1.0, dtype: Any = jnp.float32
) -> tuple[Float[jax.Array, "*p r2"], Float[jax.Array, "*p r2"]]:
    """Return cos and sin of positions.

    Args:
        positions: int [...].
        frequencies: float32 [r / 2].
        attention_scaling: factor of both.
        dtype: of the result; the angles themselves are float32.

    Returns:
        cos and sin, each [..., r / 2].
    """
    turned = jnp.asarray(positions, jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return (
        (jnp.cos(turned) * attention_scaling).astype(dtype),
        (jnp.sin(turned) * attention_scaling).astype(dtype),
    )


def rotate(
    x: Float[jax.Array, "*p k"], cos: jax.Array, sin: jax.Array, interleaved: bool = False
) -> Float[jax.Array, "*p k"]:
    """Turn the first r dimensions of the last axis; the rest pass unchanged.

    Args:
        x: [..., k].
        cos: [..., r / 2], broadcast against `x` but for the last axis.
        sin: as `cos`.
        interleaved: pairs are neighbours (GPT-J) instead of the halves (NeoX, Hugging Face Llama).

    Returns:
        As `x`; computed in float32.
    """
    r = 2 * cos.shape[-1]
    turning, rest = x[..., :r].astype(jnp.float32), x[..., r:]
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """Rotary embedding of one configuration: callable on queries and keys, or `sin, cos` tables.

    `rope(query, key, positions)` turns both, with heads on the axis before the last;
    `sin, cos = rope` unpacks the tables, each [s, r / 2], in the table's dtype.

    Attributes:
        axis: which axis of positions turns each frequency (`ed_infra.rope_sections`), where a model
            has several; positions are then [a, ..., s].
    """

    frequencies: np.ndarray
    attention_scaling: float = 1.0
    length: int = 0
    interleaved: bool = False
    dtype: Any = jnp.float32
    axis: np.ndarray | None = None

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """Return sin and cos of positions 0 … length - 1, each [s, r / 2]."""
        cos, sin = angles(
            jnp.arange(self.length), self.frequencies, self.attention_scaling, self.dtype
        )
        return sin, cos

    def __iter__(self) -> Any:
        return iter(self.tables())

    def __call__(
        self, query: jax.Array, key: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Turn query and key.

        Args:
            query: [..., s, h, k].
            key: [..., s, g, k].
            positions: int [..., s], or [a, ..., s] where there are several axes.
        """
        cos, sin = angles(positions, self.frequencies, self.attention_scaling)
        if self.axis is not None and jnp.ndim(positions) == query.ndim - 1:
            cos, sin = select_axis(cos, self.axis), select_axis(sin, self.axis)
        cos, sin = cos[..., None, :], sin[..., None, :]
        return (
            rotate(query, cos, sin, self.interleaved),
            rotate(key, cos, sin, self.interleaved),
        )
