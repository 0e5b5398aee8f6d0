"""Immutable values of a configuration: quantization, LoRA, kernel settings, masks of layers.

They are hashable dataclasses that convert to and from JSON. This module does not import jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from ed_infra.dtypes import canonical_dtype
from ed_infra.enums import EasyDeLPlatforms
from ed_infra.errors import ConfigError, did_you_mean, unknown_name

T = TypeVar("T")

#: Storage formats of quantized weights: name -> (bits, whether activations are also quantized).
QUANTIZATION_FORMATS: dict[str, tuple[int, bool]] = {
    "nf4": (4, False),
    "int8": (8, False),
    "int4": (4, False),
    "fp8": (8, False),
    "mxfp8": (8, False),
    "mxfp4": (4, False),
    "w8a8": (8, True),
    "w4a8": (4, True),
    "gguf": (8, False),
    "gguf_a8": (8, True),
}
#: Formats that keep the codes of a GGUF file while it is loaded. No number is converted to them.
KEPT_CODES: tuple[str, ...] = ("gguf", "gguf_a8")
#: The pattern of `EasyDeLQuantizationConfig`.
_PATTERN = r"^(?!.*(?:embed|norm|lm_head)).*$"

#: Formats of a key-value cache.
KV_CACHE_FORMATS: tuple[str, ...] = ("int8", "fp8")
#: Format that EasyDeL's documents name for a cache -> the format in which the cache is stored.
STORED_CACHE_FORMATS: dict[str, str] = {
    **{name: name for name in KV_CACHE_FORMATS},
    **dict.fromkeys(("w8a8", "w4a8", "nf4"), "int8"),
}

#: Other names of formats.
QUANTIZATION_ALIASES: dict[str, str] = {
    "8bit": "int8",
    "a8bit": "int8",
    "a8q": "w8a8",
    "4bit": "int4",
    "a4q": "w4a8",
    "affine": "int4",
}

#: Initial values of PEFT that are not computed here -> the reason.
_OTHER_STARTS: dict[str, str] = {
    **dict.fromkeys(("eva", "corda", "lora_ga"), "needs rows of data before training"),
    "false": "makes a random change of the model",
}

#: The field `bits` -> its format.
FORMAT_OF_BITS: dict[int, str] = {4: "nf4", 8: "int8"}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class EasyDeLQuantizationConfig:
    """The quantization of the weights of linear layers, or of a key-value cache.

    Attributes:
        dtype: Format, a key of `QUANTIZATION_FORMATS` or of `QUANTIZATION_ALIASES`.
        group_size: Number of values that share a scale along the contracted dimension. None = the
            whole dimension (one scale for each output channel) in 8-bit formats; 64, or its largest
            divisor of the dimension, in 4-bit formats; 32 in mxfp8 and mxfp4 (fixed).
        double_quantization: Whether the scales of nf4 are quantized to 8 bits, in blocks of 256
            (QLoRA).
        simulate: Whether products use rounded values of weights that are trained unrounded
            (quantization-aware training).
        pattern: Regular expression over canonical names that selects the layers, unless rules do.
            With the codes of a GGUF file, the default selects every matrix.
        float_zero: Whether the scales and zeros of groups are float32 numbers, as the codes of
            some GGUF formats need them; for int8 and int4.
    """

    dtype: str = "nf4"
    group_size: int | None = None
    double_quantization: bool = False
    simulate: bool = False
    pattern: str = _PATTERN
    float_zero: bool = False

    def __post_init__(self) -> None:
        name = QUANTIZATION_ALIASES.get(self.dtype, self.dtype)
        if name not in QUANTIZATION_FORMATS:
            known_formats = [*QUANTIZATION_FORMATS, *QUANTIZATION_ALIASES]
            raise unknown_name("quantization format", self.dtype, known_formats)
        object.__setattr__(self, "dtype", name)
        if name in KEPT_CODES:
            if self.group_size is not None or self.simulate:
                option = "simulate" if self.simulate else "group_size"
                raise ConfigError(f"{option} is not for {name}, which keeps the codes of a file")
            if self.pattern == _PATTERN:
                object.__setattr__(self, "pattern", "")
        if self.float_zero and name not in ("int8", "int4"):
            raise ConfigError(f"float_zero is for int8 and int4, not for {name}")
        if self.group_size is not None and not _is_count(self.group_size):
            raise ConfigError(f"group_size must be at least 1 or None, got {self.group_size!r}")
        if name.startswith("mx") and self.group_size not in (None, 32):
            raise ConfigError(f"{name} has groups of 32, no others; got {self.group_size}")
        if self.double_quantization and name != "nf4":
            raise ConfigError(
                f"double_quantization is for nf4, not for {name}: the scales of the other formats "
                "are few, or have 8 bits"
            )

    @property
    def bits(self) -> int:
        """Bits of one stored value, without its scale."""
        return QUANTIZATION_FORMATS[self.dtype][0]

    @property
    def quantizes_activations(self) -> bool:
        """Whether matrix products also quantize activations."""
        return QUANTIZATION_FORMATS[self.dtype][1]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


#: Other names of the fields of `EasyDeLQuantizationConfig`.
QUANTIZATION_FIELD_ALIASES: dict[str, str] = {
    "quantization_method": "dtype",
    "method": "dtype",
    "block_size": "group_size",
    "double_quant": "double_quantization",
}


@dataclasses.dataclass(frozen=True)
class BaseOperationConfig:
    """Kernel settings of one operation (`operation_configs={"flash_attn2": ...}`).

    Attributes:
        platform: language of its kernel, `"jax"` (plain XLA), `"triton"` or `"pallas"`; None = the
            field `platform`.
        block_q: queries per block; None = `blocksize_q`.
        block_k: keys per block; None = `blocksize_k`.
    """

    platform: str | None = None
    block_q: int | None = None
    block_k: int | None = None

    def __post_init__(self) -> None:
        known_platforms = [platform.value for platform in EasyDeLPlatforms]
        if self.platform is not None and self.platform not in known_platforms:
            raise unknown_name("platform of an operation", self.platform, known_platforms)
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if size is not None and not _is_count(size):
                raise ConfigError(f"{name} of an operation is a number of positions, got {size!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


#: Other names of the fields of `BaseOperationConfig`: those of the configuration's own fields.
OPERATION_FIELD_ALIASES: dict[str, str] = {"blocksize_q": "block_q", "blocksize_k": "block_k"}


@dataclasses.dataclass(frozen=True)
class AttnMaskDetail:
    """Attention pattern of one layer.

    Attributes:
        mask_type: `"full"`, `"sliding"` (the last `size` positions, the own one included) or
            `"chunked"` (positions of the same chunk of `size`).
        size: window or chunk, in positions; None for `"full"`.
    """

    mask_type: str = "full"
    size: int | None = None

    def __post_init__(self) -> None:
        if self.mask_type not in ("full", "sliding", "chunked"):
            raise unknown_name("mask type", self.mask_type, ["full", "sliding", "chunked"])
        if (self.mask_type == "full") != (self.size is None):
            raise ConfigError(
                f"a {self.mask_type!r} mask has {'no' if self.size else 'a'} size, "
                f"got size={self.size}"
            )


@dataclasses.dataclass(frozen=True)
class LoftQConfig:
    """LoftQ (Li et al. 2023), with the names and the defaults of PEFT.

    Attributes:
        loftq_bits: bits of the codes of the base: 4 (nf4, a scale for 64 inputs) or 8 (int8, a
            scale for each output).
        loftq_iter: number of times that codes and adapter are fitted, in turn.
    """

    loftq_bits: int = 4
    loftq_iter: int = 1

    def __post_init__(self) -> None:
        if self.loftq_bits not in FORMAT_OF_BITS:
            raise ConfigError(f"loftq_bits must be 4 (nf4) or 8 (int8), got {self.loftq_bits!r}")
        if not _is_count(self.loftq_iter):
            raise ConfigError(f"loftq_iter must be at least 1, got {self.loftq_iter!r}")


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters: `y = x W + scale * dropout(x) A B` (Hu et al., 2021).

    Attributes:
        rank: inner dimension r of A [in, r] and B [r, out].
        alpha: numerator of the scale; None = `rank`.
        dropout: probability that an input of A is zeroed in training.
        targets: regular expression over canonical names of layers, or several; None = every linear
            layer but the head.
        rslora: the scale is `alpha / sqrt(rank)`, not `alpha / rank` (Kalajdzievski 2023).
        dora: the length of each column of `W + A B` is learned (Liu et al. 2024).
        modules_to_save: names of modules that are trained in full beside the adapters, and saved
            with them (PEFT): `"classifier"`, `"lm_head"`, `"model.embed_tokens"`. These modules
            have no adapters.
        init_lora_weights: initial values, as in PEFT. True: A is random and B is zero. `"pissa"`,
            `"pissa_niter_16"` (any number of iterations) or `"olora"`: A B is a part of W, and
            training computes with W without this part, for linear layers. `"loftq"`: W is
            replaced by codes, and A B is a part of their error.
        loftq_config: the codes of `"loftq"`, or a mapping of the fields; None = the defaults.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | tuple[str, ...] | None = None
    rslora: bool = False
    dora: bool = False
    modules_to_save: str | tuple[str, ...] | None = None
    init_lora_weights: bool | str = True
    loftq_config: LoftQConfig | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.rank):
            raise ConfigError(f"LoRA rank must be at least 1, got {self.rank!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"LoRA dropout must be in [0, 1), got {self.dropout}")
        if self.alpha is not None and not 0.0 < self.alpha < float("inf"):
            raise ConfigError(f"LoRA alpha must be a number above 0, got {self.alpha}")
        for name in ("targets", "modules_to_save"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        start = parse_lora_start(self.init_lora_weights)
        object.__setattr__(self, "init_lora_weights", start)
        if self.quantizes_weights:
            config = from_mapping(LoftQConfig, self.loftq_config or {})
            object.__setattr__(self, "loftq_config", config)
        elif self.loftq_config:
            raise ConfigError(
                f"loftq_config is set, and init_lora_weights is {start!r}: set init_lora_weights "
                "to 'loftq', or omit loftq_config"
            )

    @property
    def decomposes_weights(self) -> bool:
        """Whether the initial A B are computed from W."""
        return isinstance(self.init_lora_weights, str)

    @property
    def quantizes_weights(self) -> bool:
        """Whether W is replaced by codes (LoftQ)."""
        return self.init_lora_weights == "loftq"

    @property
    def subtracts_start(self) -> bool:
        """Whether the initial A B are a part of W, which the layer subtracts (PiSSA, OLoRA)."""
        return self.decomposes_weights and not self.quantizes_weights

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rslora else self.rank)


def parse_lora_start(value: bool | str) -> bool | str:
    """Return the initial values of an adapter in lower case.

    Raises:
        ConfigError: the initial values are unknown, or need data or codes that are not computed.
    """
    if value is True:
        return value
    name = str(value).lower()
    if name in ("pissa", "olora", "loftq") or re.fullmatch(r"pissa_niter_[1-9]\d{0,2}", name):
        return name
    reason = _OTHER_STARTS.get(name, "is unknown")
    raise ConfigError(
        f"init_lora_weights {value!r} {reason}: use true (the change starts at zero), 'pissa', "
        "'pissa_niter_16' (fewer operations for large matrices), 'olora', or 'loftq' (over codes)"
    )


def from_mapping(
    cls: type[T], value: Mapping[str, Any] | T, aliases: Mapping[str, str] | None = None
) -> T:
    """Create one of the dataclasses above from a mapping of its fields.

    Raises:
        ConfigError: A key is not a field (the message names the nearest field), or the mapping
            contains a field and its alias.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{cls.__name__} requires a mapping of its fields, got {value!r}")
    field_names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = (aliases or {}).get(key, key)
        if name not in field_names:
            hint = did_you_mean(str(key), [*field_names, *(aliases or {})])
            raise ConfigError(f"{cls.__name__} has no field {key!r}{hint}")
        if name in fields:
            raise ConfigError(f"{cls.__name__}: {key!r} is another name of {name!r}: keep one")
        fields[name] = item
    return cls(**fields)


def to_json(value: object) -> Any:
    """Convert a configuration value to JSON values.

    Tuples become lists, dtypes become names, and the dataclasses above become mappings.

    Raises:
        ConfigError: The value cannot be restored from JSON.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(getattr(value, "value", value))
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str | int) else str(key): to_json(v) for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(to_json(item) for item in value)
    if callable(to_dict := getattr(value, "to_dict", None)):
        return to_json(to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(dataclasses.asdict(value))
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return to_json(item())  # a scalar of numpy or jax
    try:
        return canonical_dtype(value)
    except ConfigError:
        raise ConfigError(
            f"{value!r} ({type(value).__name__}) cannot be written to JSON: "
            "use strings, numbers, booleans, lists and mappings"
        ) from None
