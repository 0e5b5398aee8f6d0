"""What a kernel is: one record, and the call that it computes.

A *mechanism* is what is computed, the same everywhere. A *kernel* computes one mechanism for one
kind of reading, on one platform or on all: splash attention in Pallas is a kernel of `blocksparse`
on TPU, plain XLA is its kernel everywhere. To add a kernel, write a file whose `KERNELS` are such
records, and name the file in `registry.built_in`; another package names its records under the entry
point group `easydel.kernels` instead.

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
from ed_layers.cache.codes import Codes, decode
from ed_layers.cache.paged import Pages
from ed_layers.cache.protocol import Stored
from ed_layers.cache.ragged import RaggedBatch

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

logger = get_logger(__name__)

#: What a call reads: "projected" keys and values of the same call (training, and prompts too), a
#: contiguous "cache", or the engine's "pages".
Reads = Literal["projected", "cache", "pages"]

#: The score matrix is materialised up to this many query tokens: measured on a CPU, blocks are
#: faster from there on (four times at 512 tokens, ten times at 2048).
FULL_SCORES_LIMIT = 128


@dataclass(frozen=True)
class Settings:
    """Kernel settings of one mechanism.

    Attributes:
        block_q, block_k: tokens per block; None leaves the choice to the kernel.
        platform: language of the kernel ("jax", "triton", "pallas"); None = the best there is.
        own: `operation_configs` has an entry for this mechanism.
    """

    block_q: int | None = None
    block_k: int | None = None
    platform: str | None = None
    own: bool = False

    def blocks(self, s: int, t: int, default: int = 128) -> tuple[int, int]:
        """Queries and keys per block, never more than there are."""
        return min(self.block_q or default, s), min(self.block_k or default, t)

    def allow(self, language: str) -> bool:
        """Whether a kernel in this language may be used."""
        return self.platform in (None, language)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the kernels of every reading are called with.

    Attributes:
        name: the mechanism.
        q: queries.
        scoring: how scores are made and limited.
        settings: of the mechanism.
        config: of the model, for its mesh and for options of single kernels.
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
    """Attention to keys and values of the same call: training, and prompts. Kernels are
    differentiable.

    Attributes:
        q: [b, s, h, k].
        k, v: [b, t, g, k] and [b, t, g, d].
        mask_info: who may attend to whom.

    A kernel returns [b, s, h, d], zeros for a query that sees nothing.
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
    """Attention to a contiguous cache. No gradient.

    Attributes:
        q: [b, s, h, k].
        stored: keys and values of one layer, and the mask over its slots.

    A kernel returns [b, s, h, d], zeros for a query that sees nothing.
    """

    stored: Stored
    reads: ClassVar[Reads] = "cache"

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        used = self.scoring.features(self.q, self.q, self.stored.mask_info) | {"cross"}
        return used | ({"value_dim"} if self.stored.values.shape[-1] != self.q.shape[-1] else set())

    def numbers(self) -> tuple[Float[Array, "b g t k"], Float[Array, "b g t d"]]:
        """Keys and values of the layer as numbers; a quantized cache is copied for that."""
        if self.stored.quantized:
            once(
                logger,
                f"decode_attn_mechanism={self.name!r} reads a copy of the cache that is no longer "
                "quantized; 'autoregressive_decodeattn' reads the codes",
            )
        k, v = (
            decode(x, self.q.dtype) if isinstance(x, Codes) else x
            for x in (self.stored.k, self.stored.v)
        )
        return k, v

    def projected(self) -> Projected:
        """The same call for a kernel that reads projected keys and values."""
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
    """Causal attention of a flat batch to the engine's pages. No gradient.

    Attributes:
        q: [T, h, k].
        pages: of one layer.
        ragged: which tokens and pages belong to which sequence.

    A kernel returns [T, h, d], zeros for tokens of padding.
    """

    pages: Pages
    ragged: RaggedBatch
    reads: ClassVar[Reads] = "pages"

    @property
    def features(self) -> frozenset[str]:
        """The names of FEATURES that the call uses."""
        used = self.scoring.asked
        return used if self.value_dim == self.q.shape[-1] else used | {"value_dim"}

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.pages.value_dim or self.q.shape[-1]


CallT = TypeVar("CallT", bound=Call)


def takes_all(call: Call) -> list[str]:
    """The reasons of a kernel that refuses nothing."""
    return []


def reasons(conditions: dict[str, bool]) -> list[str]:
    """The reasons whose condition holds."""
    return [reason for reason, holds in conditions.items() if holds]


@dataclass(frozen=True)
class Kernel(Generic[CallT]):
    """One way to compute one mechanism.

    Attributes:
        mechanism: a key of `registry.MECHANISMS`.
        reads: which kind of call it computes: Projected, Cached or Paged.
        title: its name in logs, errors and docs.
        run: the attention of a call; see Projected, Cached and Paged for the shapes.
        platform: "cpu", "gpu" or "tpu"; None = all.
        language: "jax" (plain XLA), "pallas", "triton", "cudnn", "native", ...; users ask for one
            by the option `platform`.
        lacks: the names of FEATURES that it never computes.
        refuses: what else of a call it cannot compute, in words ("a traced window"); the call then
            goes to the next kernel of the mechanism, plain XLA at the end.
        available: whether everything that it needs is installed.
        needs: the name of the package that it needs.
        auto_from: "auto" takes it for this many queries or more; None = only by name.
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
        """What the kernel cannot compute of a call, in words; empty if it takes the call."""
        missing = self.lacks & call.features
        return [words for name, words in FEATURES.items() if name in missing] + self.refuses(call)
