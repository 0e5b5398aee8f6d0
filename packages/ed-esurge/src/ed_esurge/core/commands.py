"""What an engine can be told: plain data, so that a host can send it to others as bytes.

Engines that execute the same commands between the same steps plan the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ed_esurge.sampling import PoolingParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request. `Intake.prepare` makes one: checked, tokenized, and fit to the context.

    Attributes:
        request_id: unique among the requests that are not finished.
        token_ids: the prompt.
        params: how to sample, or what to pool.
        max_tokens: most tokens to generate; prompt and `max_tokens` fit the context.
        eos_token_ids: ids that end a completion.
        bad_token_ids: token sequences that may not be generated.
        stops: stop strings, the engine's own included.
        priority: smaller goes first under the `priority` policy.
        prompt: the text, if it was text.
        salt: 16 bytes, or none. Pages of the prefix cache are shared within one salt only.
        adapter: number of its LoRA adapter; 0 = none.
        arrival_time: on the monotonic clock of the host that took the request.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams | PoolingParams
    max_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    stops: tuple[str, ...] = ()
    priority: int = 0
    prompt: str | None = None
    salt: bytes = b""
    adapter: int = 0
    arrival_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; ids that are not known are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop stepping, and free the pages if `free_pages`; running requests are computed anew."""

    free_pages: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after `Pause`."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """`Pause`, and free the weights, too: what the device has is for others.

    Attributes:
        keep_weights: in host memory (where that is the device's, they stay where they are); False
            forgets them, so that `UpdateWeights` must come before `WakeUp`.
    """

    keep_weights: bool = True


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Go on after `Sleep`."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Serve other weights from the next step on.

    Attributes:
        weights: a model of the same architecture, its state, or the leaves of its state.
        copy: own the arrays; False reads the caller's arrays until `DropWeights`.
    """

    weights: Any
    copy: bool = True


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Let go of the weights: no step runs before the next `UpdateWeights`."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes, those in host memory too; running requests are computed anew."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Serve a LoRA adapter under a name from the next step on.

    Attributes:
        name: what requests call it.
        adapter: canonical names of matrices -> what they learned
            (`ed_models.adapter_values.Adapter`, which is arrays in host memory).
        source: where it came from, for people.
    """

    name: str
    adapter: Mapping[str, Any]
    source: str | None = None


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Let no new request use the adapter of a name; those that use it go on to their ends."""

    name: str


Command = (
    Add
    | Abort
    | Pause
    | Resume
    | Sleep
    | WakeUp
    | UpdateWeights
    | DropWeights
    | ResetPrefixCache
    | LoadAdapter
    | UnloadAdapter
)
