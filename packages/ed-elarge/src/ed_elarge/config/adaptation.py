"""The keys of sections that adapt a model: low-rank adapters, weights and caches of few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ed_infra.options import Options, choice
from ed_infra.specs import KV_CACHE_FORMATS, QUANTIZATION_ALIASES, QUANTIZATION_FORMATS
from pydantic import BeforeValidator, Field, StrictBool, model_validator

from ed_elarge.config.sections import Positive, SetsConfig

Pattern = Annotated[str, Field(min_length=1)]
Patterns = Annotated[
    tuple[Pattern, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class LoraSection(Options):
    """Low-rank adapters on the model's layers; all other parameters stay as they are."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "adapter_name_or_path": "name_or_path",
        "lora_model_dir": "name_or_path",
        "r": "rank",
        "lora_rank": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
        "lora_pattern": "targets",
        "use_rslora": "rslora",
        "use_dora": "dora",
    }

    name_or_path: Pattern | None = None
    """A directory in PEFT's layout to begin with: it says rank, alpha and targets. None: new
    adapters, which change nothing at first."""
    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    """Inner dimension of an adapter."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What an adapter adds is multiplied by `alpha / rank`. None: `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of an adapter's inputs, in training."""
    targets: Patterns | None = None
    """Patterns over the names of linear layers and embeddings. None: every linear layer but the
    head."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead."""
    dora: bool = False
    """Learn the length of each column of the weights too."""

    @model_validator(mode="after")
    def _one_source(self) -> LoraSection:
        others = sorted(self.model_fields_set - {"name_or_path"})
        if self.name_or_path is not None and others:
            raise ValueError(
                f"{', '.join(others)}: the adapter of name_or_path has its own; leave them out, or "
                "leave name_or_path out to begin a new adapter"
            )
        return self


_CACHE_ALIASES = {k: v for k, v in QUANTIZATION_ALIASES.items() if v in KV_CACHE_FORMATS}


class _Format(Options):
    """A format of few bits."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "method": "quantization_method",
        "dtype": "quantization_method",
        "block_size": "group_size",
    }

    group_size: Positive | None = None
    """Numbers that share a scale. None: as the format has it."""


class CacheFormat(_Format):
    """`quantization.kv_cache`: keys and values of generation and serving."""

    quantization_method: Annotated[str, choice("method", KV_CACHE_FORMATS, _CACHE_ALIASES)] = "int8"
    """8-bit integers (`int8`, `8bit`), or floating-point numbers (`fp8`)."""


class WeightFormat(_Format):
    """`quantization.model`: the matrices of the model."""

    quantization_method: Annotated[
        str, choice("method", QUANTIZATION_FORMATS, QUANTIZATION_ALIASES)
    ] = "nf4"
    """Format of the weights."""
    pattern: Pattern | None = None
    """Which layers, by a regular expression over their names. None: all but embeddings and head."""
    double_quantization: StrictBool = False
    """Quantize the scales too (`nf4` only)."""
    simulate: StrictBool = False
    """Quantization-aware training: the weights stay as they are and learn, and the model computes
    with what they would be rounded to."""


class QuantizationSection(SetsConfig):
    """Weights, or keys and values, in few bits."""

    ALIASES: ClassVar[Mapping[str, str]] = {"quantize_tensors": "apply_quantization"}

    model: WeightFormat | None = None
    """Of the weights, which stay as they are from then on: training needs the section `lora`, and
    has adapters of rank 16 where there is none."""
    kv_cache: CacheFormat | None = None
    """Of the cache."""
    apply_quantization: StrictBool = True
    """False: the weights stay as they are."""
    platform: Annotated[str | None, choice("platform", ("jax", "triton", "pallas"))] = None
    """Language of the kernels: plain XLA (`jax`) is the only one there is for these products."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Field -> (key, value)."""
        if self.kv_cache is None:
            return {}
        value = {"dtype": self.kv_cache.quantization_method, "group_size": self.kv_cache.group_size}
        return {"kv_cache_quantization_config": (("kv_cache",), value)}
