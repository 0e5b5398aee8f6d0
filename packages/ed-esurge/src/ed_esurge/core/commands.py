"""Commands of an engine: plain data, which a host can send to other hosts.

Engines that execute the same commands between the same steps plan the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ed_infra.content import content_key

from ed_esurge.sampling import PoolingParams, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens a completion may contain, with the names of Hugging Face's generation config.

    Attributes:
        suppress_tokens: tokens that are never generated.
        begin_suppress_tokens: tokens that are never generated first.
        forced_eos_token_id: the token that a completion of the maximum length ends with.
    """

    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: int | None = None

    def get_banned_tokens(self, count: int) -> tuple[int, ...]:
        """Return the tokens that are not allowed after `count` generated tokens."""
        return self.suppress_tokens + (() if count else self.begin_suppress_tokens)

    def forces_end(self, count: int, max_tokens: int) -> bool:
        """Return whether the token after `count` generated tokens is the forced end."""
        return self.forced_eos_token_id is not None and count == max_tokens - 1


@dataclass(frozen=True)
class DecoderStart:
    """The tokens of a decoder before its completion, and the rules of the completion.

    Attributes:
        start: `decoder_start_token_id`.
        forced_bos: `forced_bos_token_id`, the token after `start`; None = no such token.
        rules: rules of the tokens; None = no rules.
        bad_words_ids: sequences of tokens that are never generated.
    """

    start: int
    forced_bos: int | None = None
    rules: TokenRules | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    def prefix(self, forced_bos: int | None) -> list[int]:
        """Return the tokens before a completion.

        Args:
            forced_bos: the token of a request that replaces `forced_bos`.
        """
        second = self.forced_bos if forced_bos is None else forced_bos
        return [self.start] if second is None else [self.start, second]


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One item of a model's encoder, such as an image.

    Attributes:
        key: hash of `arrays` and `length`. Items with equal keys are encoded once.
        arrays: name -> array of the item, without the batch axis (`pixel_values` [c, h, w], or
            [patches, numbers] with `image_grid_thw` [3]).
        start, length: position of the first placeholder token in the prompt, and their number.
        gaps: offsets from `start` of other tokens between the placeholder tokens, such as the
            tokens that end the rows of an image (Pixtral).
    """

    key: bytes
    arrays: Mapping[str, np.ndarray]
    start: int
    length: int
    gaps: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last placeholder token."""
        return self.start + self.length + len(self.gaps)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], start: int, length: int) -> EncoderInput:
        """Create an item and compute its key."""
        return cls(content_key(arrays, length), dict(arrays), start, length)

    @classmethod
    def at(cls, arrays: Mapping[str, np.ndarray], places: Sequence[int]) -> EncoderInput:
        """Create an item from the positions of its placeholder tokens, in ascending order."""
        first, last = places[0], places[-1]
        gaps = set(range(first, last + 1)).difference(places)
        offsets = tuple(sorted(place - first for place in gaps))
        return replace(cls.of(arrays, first, len(places)), gaps=offsets)

    def spread(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the row of each token from `start` to before `stop`; -1 for a gap.

        Args:
            rows: the row of each placeholder token.
        """
        if not self.gaps:
            return rows
        gaps, remaining = {*self.gaps}, iter(rows)
        return [-1 if at in gaps else next(remaining) for at in range(self.stop - self.start)]


def find_runs(items: Sequence[EncoderInput]) -> list[tuple[int, int]]:
    """Return the runs of placeholder tokens: the first, and the one after the last, of items
    without other tokens between them."""
    runs: list[tuple[int, int]] = []
    for item in items:
        first = item.start
        if runs and runs[-1][1] == first:
            first, _ = runs.pop()
        runs.append((first, item.stop))
    return runs


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request. `Intake.prepare` validates and tokenizes a request and fits its length.

    Attributes:
        request_id: id, unique among the unfinished requests.
        token_ids: token ids of the prompt.
        params: sampling or pooling options.
        max_tokens: maximum number of generated tokens; prompt and `max_tokens` fit the context.
        eos_token_ids: ids that end a completion.
        bad_token_ids: token sequences that may not be generated.
        rules: rules of the checkpoint for the tokens; None = no rules.
        stops: stop strings, including those of the engine.
        priority: priority under the `priority` policy; smaller is scheduled first.
        prompt: the text of the prompt; None for a prompt of token ids.
        salt: 16 bytes, or empty. Only requests with equal salts share pages of the prefix cache.
        adapter: number of the LoRA adapter; 0 = none.
        arrival_time: time on the monotonic clock of the host that accepted the request.
        encoder_inputs: inputs of the model's encoder, in the order of their placeholder tokens.
        positions: rotary positions of the prompt along time, height and width, [3, s]; None = the
            numbers of the tokens.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams | PoolingParams
    max_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    rules: TokenRules | None = None
    stops: tuple[str, ...] = ()
    priority: int = 0
    prompt: str | None = None
    salt: bytes = b""
    adapter: int = 0
    arrival_time: float = 0.0
    encoder_inputs: tuple[EncoderInput, ...] = ()
    positions: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the steps, and free the pages if `free_pages`. Running requests are recomputed."""

    free_pages: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume after `Pause`."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Pause, and free the device memory of pages and weights.

    Attributes:
        keep_weights: True moves the weights to host memory (no effect on a CPU). False drops them,
            so that `UpdateWeights` is required before `WakeUp`.
    """

    keep_weights: bool = True


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Resume after `Sleep`."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace the weights before the next step.

    Attributes:
        weights: a model of the same architecture, its state, or the leaves of its state.
        copy: whether to copy the arrays. False uses the caller's arrays until `DropWeights`.
    """

    weights: Any
    copy: bool = True


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Release the weights. No step can run before the next `UpdateWeights`."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Clear the prefix cache, including host memory. Running requests are recomputed."""


@dataclass(frozen=True, slots=True)
class StorePages:
    """Write the pages of the prefix cache to `prefix_cache_directory`.

    Attributes:
        most_bytes: None = all pages; otherwise only pages that were not written before, until their
            size reaches this number of bytes.
    """

    most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA adapter under a name before the next step.

    Attributes:
        name: name of the adapter in requests.
        adapter: canonical matrix names -> adapter values (`ed_models.adapters.values.Adapter`,
            arrays in host memory).
        source: description of the origin, for users.
    """

    name: str
    adapter: Mapping[str, Any]
    source: str | None = None


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Reject new requests for an adapter. Unfinished requests continue to use the adapter."""

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
    | StorePages
    | LoadAdapter
    | UnloadAdapter
)
