"""The sections `lora` and `quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.errors import ConfigError
from ed_infra.options import Count, Options, choice
from ed_infra.specs import (
    QUANTIZATION_ALIASES,
    QUANTIZATION_FORMATS,
    STORED_CACHE_FORMATS,
    parse_lora_start,
)
from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator

from ed_elarge.config.sections import SetsConfig

ParameterPattern = Annotated[str, Field(min_length=1)]
Patterns = Annotated[
    tuple[ParameterPattern, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


def _check_start(value: bool | str) -> bool | str:
    try:
        return parse_lora_start(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


class LoftQSection(Options):
    """`lora.loftq_config`: the codes of LoftQ, with the names and defaults of PEFT."""

    loftq_bits: Literal[4, 8] = 4
    """Bits of a code of the base: 4 (nf4, a scale for 64 inputs) or 8 (int8, a scale for each
    output)."""
    loftq_iter: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of times that codes and adapter are fitted, in turn."""


class LoraSection(Options):
    """Low-rank adapters on the model's layers; all other parameters are frozen."""

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

    name_or_path: ParameterPattern | None = None
    """Directory of adapters in PEFT's layout, which defines rank, alpha and targets. None: new
    adapters, which do not change the model initially."""
    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    """Inner dimension of an adapter."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The output of an adapter is multiplied by `alpha / rank`. None: `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of an adapter's inputs during training."""
    targets: Patterns | None = None
    """Patterns over the names of linear layers and embeddings. None: every linear layer except the
    head."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead."""
    dora: bool = False
    """Also train the norm of each column of the weights (DoRA)."""
    modules_to_save: Patterns | None = None
    """Names of modules that are trained in full and saved with the adapters, as in PEFT:
    `classifier`, `score`, `lm_head`, `embed_tokens`. The last parts of a name are sufficient. These
    modules have no adapters."""
    init_lora_weights: Annotated[bool | str, AfterValidator(_check_start)] = True
    """Initial values, as in PEFT. `true`: an adapter does not change the model at first. `pissa`:
    it is the part of each matrix with the largest singular values; `pissa_niter_16` finds this part
    by 16 iterations, which is faster for large matrices. `olora`: it is a part of a QR
    decomposition. Training computes with the remaining part of the matrix, and the saved adapter
    has twice the rank and fits the unchanged base. `loftq`: the matrices become codes, and the
    adapter is a part of their error. Not with `quantization.model`."""
    loftq_config: LoftQSection | None = None
    """Codes of `init_lora_weights: loftq`; they are computed from a base that is not quantized."""

    @property
    def decomposes_weights(self) -> bool:
        """Whether the initial values of new adapters are computed from the weights."""
        return isinstance(self.init_lora_weights, str)

    @property
    def subtracts_start(self) -> bool:
        """Whether new adapters start as a part of the weights, which each layer subtracts."""
        return self.decomposes_weights and self.init_lora_weights != "loftq"

    @model_validator(mode="after")
    def _codes_of_loftq(self) -> LoraSection:
        if self.loftq_config is not None and self.init_lora_weights != "loftq":
            raise ValueError("loftq_config: set init_lora_weights to loftq, or omit loftq_config")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> LoraSection:
        other_keys = sorted(self.model_fields_set - {"name_or_path"})
        if self.name_or_path is not None and other_keys:
            raise ValueError(
                f"{', '.join(other_keys)}: the adapter of name_or_path defines these values; "
                "omit them, or omit name_or_path for a new adapter"
            )
        return self


_CACHE_ALIASES = {k: v for k, v in QUANTIZATION_ALIASES.items() if v in STORED_CACHE_FORMATS}


class _Format(Options):
    """A quantization format."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "method": "quantization_method",
        "dtype": "quantization_method",
        "block_size": "group_size",
    }

    group_size: Count | None = None
    """Number of values that share a scale. None: the default of the format."""


class CacheFormat(_Format):
    """`quantization.kv_cache`: format of the key-value cache in generation and serving.

    A `group_size` that does not divide the dimension of a head is replaced by the dimension of a
    head, with a message.
    """

    quantization_method: Annotated[str, choice("method", STORED_CACHE_FORMATS, _CACHE_ALIASES)] = (
        "int8"
    )
    """8-bit integers (`int8`; `8bit`, `a8bit` and `a8q` are other names), or floating-point numbers
    (`fp8`). `nf4` and `a4q` are stored in 8 bits as well, with a warning."""


class WeightFormat(_Format):
    """`quantization.model`: format of the model's matrices."""

    quantization_method: Annotated[
        str, choice("method", QUANTIZATION_FORMATS, QUANTIZATION_ALIASES)
    ] = "nf4"
    """Format of the weights. `gguf` keeps the codes of a GGUF file; `gguf_a8` also rounds
    activations to 8 bits."""
    pattern: ParameterPattern | None = None
    """Regular expression over the names of layers. None: all except embeddings and head; with the
    codes of a GGUF file, all."""
    double_quantization: StrictBool = False
    """Also quantize the scales (`nf4` only)."""
    simulate: StrictBool = False
    """Quantization-aware training: the model computes with rounded weights and trains the unrounded
    weights."""


class QuantizationSection(SetsConfig):
    """Quantization of weights and of the key-value cache."""

    ALIASES: ClassVar[Mapping[str, str]] = {"quantize_tensors": "apply_quantization"}

    model: WeightFormat | None = None
    """Format of the weights. Quantized weights are frozen: training uses the section `lora`, or
    adapters of rank 16 if the section is omitted."""
    kv_cache: CacheFormat | None = None
    """Format of the key-value cache."""
    apply_quantization: StrictBool = True
    """False: the weights are not quantized."""
    platform: Annotated[str | None, choice("platform", ("jax", "triton", "pallas"))] = None
    """Language of the kernels. No effect: products of few rows with quantized weights use Triton on
    one GPU, and all others XLA. `native_kernels: false` of `base_config` selects XLA."""

    def config_fields(self) -> dict[str, tuple[tuple[str, ...], Any]]:
        if self.kv_cache is None:
            return {}
        value = {"dtype": self.kv_cache.quantization_method, "group_size": self.kv_cache.group_size}
        return {"kv_cache_quantization_config": (("kv_cache",), value)}
