"""`rope_parameters` of a configuration: spellings, checks, and the entry of one layer type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ed_infra.errors import ConfigError, did_you_mean, unknown_name
from ed_infra.logging import get_logger, once

logger = get_logger(__name__)

_EVERYWHERE = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
        *("mrope_section", "mrope_interleaved", "interleaved"),
    }
)
_LENGTHS = {"factor", "original_max_position_embeddings"}
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}

#: Rope type -> its parameters, in addition to the common parameters.
READS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha"},
    "yarn": _LENGTHS | _YARN,
    "longrope": {*_LENGTHS, "attention_factor", "short_factor", "long_factor"},
    "llama3": {*_LENGTHS, "low_freq_factor", "high_freq_factor"},
    "proportional": {"factor"},
    "axial": set(),
}

_MAY_BE_0 = frozenset({"attention_factor", "mscale", "mscale_all_dim"})
_NUMBERS = frozenset({"rope_theta", "partial_rotary_factor"}).union(*READS.values()) - {"truncate"}


@dataclasses.dataclass(frozen=True)
class RopeSettings:
    """The values that determine the frequencies of one layer type.

    Attributes:
        parameters: Hugging Face's `rope_parameters` of the layer type, in new spelling.
        head_dim: k.
        max_position_embeddings: Configured number of positions, or None.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int | None = None

    @property
    def rope_type(self) -> str:
        """Rope type: a key of `ROPE_TYPES`."""
        return self.parameters.get("rope_type", "default")

    @property
    def theta(self) -> float:
        """Base of the frequencies."""
        return float(self.parameters.get("rope_theta") or 10_000.0)

    @property
    def rotary_dim(self) -> int:
        """r: number of rotated dimensions."""
        return int(self.head_dim * (self.parameters.get("partial_rotary_factor") or 1.0))

    def get(self, name: str, default: object = None) -> Any:
        """Return a parameter, or `default` if it is missing or None."""
        value = self.parameters.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a required parameter."""
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
    """Return `rope_parameters` in new spelling: with `rope_type` and the base.

    Args:
        parameters: `rope_parameters`, or the `rope_scaling` of an older file, or None.
        rope_theta: Base, if the mapping has none.
        partial_rotary_factor: Fraction of rotated dimensions, if the mapping has none.
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


def check_parameters(
    parameters: Mapping[str, Any], *, names: bool = False, known_names: Iterable[str] = ()
) -> None:
    """Check the values of `rope_parameters`, or of its entry for each layer type.

    Args:
        parameters: The mapping, in old or new spelling.
        names: Whether to raise an error for unknown names and warn about parameters that the rope
            type does not use. Otherwise, as for files, only warn about unknown names.
        known_names: Further allowed names.

    Raises:
        ConfigError: A number is not finite or too small, or a name is unknown.
    """
    known_names = set(known_names)
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            check_parameters(value, names=names, known_names=known_names)
        else:
            flat[name] = value
    for name in sorted(_NUMBERS & flat.keys()):
        value = flat[name]
        for number in value if isinstance(value, list | tuple) else [value]:
            limit = "" if number is None else _broken_limit(name, number)
            if limit:
                raise ConfigError(
                    f"rope_parameters: {name} = {number!r} must be {limit}", field=name
                )
    kind = str(standard_parameters(flat)["rope_type"])
    if names and kind not in {*READS, "axial"}:  # axial: used by transformers only
        raise unknown_name("rope_type", kind, READS)
    anywhere = _EVERYWHERE.union(known_names, *READS.values())
    reads = _EVERYWHERE | known_names | READS.get(kind, anywhere)
    for name in sorted(flat.keys() - reads):
        if names and name not in anywhere:
            raise ConfigError(
                f"rope_parameters: unknown name {name!r}{did_you_mean(name, reads)} "
                f"(rope_type {kind!r} reads rope_theta, partial_rotary_factor"
                f"{''.join(f', {known_names}' for known_names in sorted(READS.get(kind, ())))})",
                field=name,
            )
        if names or name not in anywhere:
            once(logger, f"rope_parameters: {name!r} has no effect with rope_type {kind!r}")


def _broken_limit(name: str, number: object) -> str:
    """Return the violated limit of a parameter, or an empty string."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return "a number"
    if not math.isfinite(number):
        return "a finite number"
    if name in _MAY_BE_0:
        return "" if number >= 0 else "at least 0"
    if name == "partial_rotary_factor" and number > 1:
        return "at most 1"
    return "" if number > 0 else "above 0"


def settings(
    config: object, head_dim: int | None = None, layer_type: str | None = None
) -> RopeSettings:
    """Read the settings from a configuration.

    Args:
        config: A configuration, or a mapping of rope parameters.
        head_dim: k; the default comes from the configuration, or is hidden size / heads.
        layer_type: Layer type, if `rope_parameters` has an entry for each one.

    Raises:
        ConfigError: The head dimension or the layer type is missing, or a value is invalid.
    """
    if isinstance(config, Mapping):
        parameters, positions = config, config.get("max_position_embeddings")
    else:
        parameters = getattr(config, "rope_parameters", None) or {}
        positions = getattr(config, "max_position_embeddings", None)
        head_dim = head_dim or getattr(config, "head_dim", None)
        width, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
        if head_dim is None and width and heads:
            head_dim = width // heads
    if head_dim is None:
        raise ConfigError("rotary embeddings need head_dim, or hidden_size and num_attention_heads")
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if nested:
        if layer_type not in nested:
            raise unknown_name("layer type of rope_parameters", layer_type, nested)
        parameters = nested[layer_type]
    ignored_keys = getattr(config, "ignore_keys_at_rope_validation", ())
    check_parameters(parameters, known_names={"max_position_embeddings", *ignored_keys})
    standard = standard_parameters(
        parameters,
        rope_theta=getattr(config, "rope_theta", None),
        partial_rotary_factor=getattr(config, "partial_rotary_factor", None),
    )
    return RopeSettings(standard, head_dim, positions)
