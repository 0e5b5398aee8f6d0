"""The table of mechanisms, the record of a kernel, and the calls that kernels compute.

A *mechanism* defines the result of attention, which is the same on every platform. A *kernel*
computes one mechanism for one source of keys, on one platform or on all platforms. For example,
`blocksparse` has a Pallas kernel on TPU (splash attention), and a plain XLA kernel everywhere. To
add a kernel, write a file with a tuple `KERNELS` of records, and add the file to
`kernels.built_in`. Another package lists its records in the entry point group `easydel.kernels`.

The valid values of options and the tables of docs/attention.md follow from the table of mechanisms.

Legend: b batch, s query length, t key length or slots, h heads, g kv heads, k head dim of queries
and keys, d head dim of values, T flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

import jax
from ed_infra.logging import get_logger, once
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.attention.scoring import FEATURES, Scoring
from ed_layers.cache.codes import Codes, decode_numbers
from ed_layers.cache.protocol import StoredLayer
from ed_layers.cache.ragged import RaggedBatch

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

    from ed_layers.cache.paged import Pages

logger = get_logger(__name__)

#: Source of keys and values: "projected" in the same call (training, and prompts), a contiguous
#: "cache", or the "pages" of the engine.
Reads = Literal["projected", "cache", "pages"]

#: Up to this number of queries, the score matrix is materialized. Measured on a CPU, blocks are
#: faster for more queries (four times at 512 tokens, ten times at 2048).
FULL_SCORES_LIMIT = 128


@dataclass(frozen=True)
class Settings:
    """Kernel settings of one mechanism.

    Attributes:
        block_q, block_k: tokens per block; None = the kernel chooses.
        platform: language of the kernel ("jax", "triton", "pallas"); None = the fastest.
        is_explicit: whether `operation_configs` has an entry for this mechanism.
    """

    block_q: int | None = None
    block_k: int | None = None
    platform: str | None = None
    is_explicit: bool = False

    def blocks(self, s: int, t: int, default: int = 128) -> tuple[int, int]:
        """Return the queries and keys per block, at most `s` and `t`."""
        return min(self.block_q or default, s), min(self.block_k or default, t)

    def allow(self, language: str) -> bool:
        """Return whether a kernel in this language may be used."""
        return self.platform in (None, language)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments that all kernels receive.

    Attributes:
        name: the mechanism.
        q: queries.
        scoring: the settings of the scores.
        settings: kernel settings of the mechanism.
        config: the model's configuration, for its mesh and for options of single kernels.
    """

    name: str
    q: jax.Array
    scoring: Scoring
    settings: Settings = Settings()
    config: EasyDeLBaseConfig | None = None
    reads: ClassVar[Reads]

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Projected(Call):
    """Attention to keys and values of the same call: training, and prompts.

    A kernel is differentiable. It returns [b, s, h, d], and zeros for a query without visible keys.

    Attributes:
        q: [b, s, h, k].
        k, v: [b, t, g, k] and [b, t, g, d].
        mask_info: the attention mask.
    """

    k: Float[Array, "b t g k"]
    v: Float[Array, "b t g d"]
    mask_info: MaskInfo
    reads: ClassVar[Reads] = "projected"

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        return self.scoring.features(self.q, self.v, self.mask_info)


@dataclass(frozen=True, kw_only=True)
class Cached(Call):
    """Attention to a contiguous cache, without gradients.

    A kernel returns [b, s, h, d], and zeros for a query without visible keys.

    Attributes:
        q: [b, s, h, k].
        stored: keys and values of one layer, and the mask over its slots.
    """

    stored: StoredLayer
    reads: ClassVar[Reads] = "cache"

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        used = self.scoring.features(self.q, self.q, self.stored.mask_info) | {"cross"}
        return used | ({"value_dim"} if self.stored.values.shape[-1] != self.q.shape[-1] else set())

    def numbers(self) -> tuple[Float[Array, "b g t k"], Float[Array, "b g t d"]]:
        """Return keys and values of the layer as numbers; codes are decoded to a copy."""
        if self.stored.quantized:
            once(
                logger,
                f"decode_attn_mechanism={self.name!r} decodes the quantized cache to a copy; "
                "'autoregressive_decodeattn' reads the codes without a copy",
            )
        k, v = (
            decode_numbers(x, self.q.dtype) if isinstance(x, Codes) else x
            for x in (self.stored.k, self.stored.v)
        )
        return k, v

    def to_projected(self) -> Projected:
        """Return the same call for a kernel that reads projected keys and values."""
        k, v = (x.swapaxes(1, 2) for x in self.numbers())
        return Projected(
            name=self.name,
            q=self.q,
            k=k,
            v=v,
            mask_info=self.stored.mask_info,
            scoring=self.scoring,
            settings=self.settings,
            config=self.config,
        )


@dataclass(frozen=True, kw_only=True)
class Paged(Call):
    """Causal attention of a flat batch to the engine's pages, without gradients.

    A kernel returns [T, h, d], and zeros for padding.

    Attributes:
        q: [T, h, k].
        pages: the pages of one layer.
        ragged: the sequences of the tokens and pages.
    """

    pages: Pages
    ragged: RaggedBatch
    reads: ClassVar[Reads] = "pages"

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        shapes = {
            "ahead": self.ragged.ahead is not None,
            "value_dim": self.value_dim != self.q.shape[-1],
        }
        return self.scoring.asked | {name for name, is_used in shapes.items() if is_used}

    @property
    def value_dim(self) -> int:
        """Size of a value."""
        return self.pages.value_dim or self.q.shape[-1]


CallT = TypeVar("CallT", bound=Call)


def takes_all(call: Call) -> list[str]:
    """Return no reasons: the kernel accepts every call."""
    return []


def reasons(conditions: dict[str, bool]) -> list[str]:
    """Return the reasons whose condition holds."""
    return [reason for reason, holds in conditions.items() if holds]


@dataclass(frozen=True)
class Kernel(Generic[CallT]):
    """An implementation of a mechanism.

    Attributes:
        mechanism: a key of MECHANISMS.
        reads: the kind of call that the kernel computes: Projected, Cached or Paged.
        title: name of the kernel in logs, errors and docs.
        run: computes a call; Projected, Cached and Paged describe the shapes.
        platform: "cpu", "gpu" or "tpu"; None = all.
        language: "jax" (plain XLA), "pallas", "triton", "cudnn", "native", ...; the option
            `platform` selects a language.
        lacks: names of FEATURES that the kernel does not support.
        refuses: returns further reasons why the kernel does not support a call, such as "a traced
            window". The next kernel of the mechanism then computes the call; plain XLA is last.
        available: returns whether the required packages are installed.
        needs: name of the required package.
        auto_from: minimum number of queries for which "auto" uses the kernel; None = "auto" never
            uses the kernel.
    """

    mechanism: str
    reads: Reads
    title: str
    run: Callable[[CallT], jax.Array]
    platform: str | None = None
    language: str = "jax"
    lacks: frozenset[str] = frozenset()
    refuses: Callable[[CallT], list[str]] = takes_all
    available: Callable[[], bool] = lambda: True
    needs: str = ""
    auto_from: int | None = FULL_SCORES_LIMIT + 1

    def refusals(self, call: CallT) -> list[str]:
        """Return the reasons why the kernel does not support a call; empty if it does."""
        missing = self.lacks & call.features
        return [words for name, words in FEATURES.items() if name in missing] + self.refuses(call)


ALL = frozenset(FEATURES)
PAGED = frozenset(
    {"ahead", "window", "chunk", "soft_cap", "sinks", "value_dim", "alibi", "relative"}
)


@dataclass(frozen=True)
class Ability:
    """The abilities of a mechanism, which are the same on every platform.

    Attributes:
        features: names of the supported FEATURES.
        reads: source of keys and values.
        doc: one line for generated tables.
    """

    features: frozenset[str]
    reads: Reads
    doc: str


#: The names are those of `ed_infra.enums.AVAILABLE_ATTENTION_MECHANISMS`.
MECHANISMS: dict[str, Ability] = {
    "vanilla": Ability(ALL, "projected", "full score matrix; the exact reference, any feature"),
    "blockwise": Ability(
        ALL,
        "projected",
        "online softmax over key blocks, masked blocks skipped; memory linear in length",
    ),
    "ring": Ability(
        ALL - {"ahead", "relative"},
        "projected",
        "context parallelism: keys travel around the devices that split the sequence, in zig-zag "
        "order if causal",
    ),
    "flash_attn2": Ability(
        ALL, "projected", "the platform's flash attention kernel; otherwise equal to blockwise"
    ),
    "blocksparse": Ability(
        ALL - {"bias", "dropout"},
        "projected",
        "splash attention, which skips blocks outside the mask; otherwise equal to blockwise",
    ),
    "cudnn": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "cuDNN's flash attention in bfloat16 and float16; otherwise equal to blockwise",
    ),
    "sdpa": Ability(
        ALL - {"soft_cap", "sinks", "dropout"},
        "projected",
        "jax.nn.dot_product_attention in XLA, with the mask as an array",
    ),
    "autoregressive_decodeattn": Ability(
        ALL - {"dropout"},
        "cache",
        "few queries over the written part of a long cache, in parallel splits on accelerators",
    ),
    "ragged_page_attention_v3": Ability(
        PAGED, "pages", "mixed prefill and decode over pages; the engine's mechanism"
    ),
    "ragged_page_attention_v2": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3, because jax has one such kernel",
    ),
    "page_attention": Ability(
        PAGED,
        "pages",
        "another name of ragged_page_attention_v3, which includes decoding of single tokens",
    ),
}
