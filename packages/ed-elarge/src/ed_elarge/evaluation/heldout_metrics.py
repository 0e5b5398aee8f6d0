"""What a model has learned, against two things that any table could know.

All figures are of the same held-out tokens, in nats per token: the model's cross-entropy, the
entropy of the tokens' own frequencies (the best that a unigram distribution could do), and the
cross-entropy of the same model when it sees one token of context instead of all (what a table of
pairs could do).

Legend: b rows, s positions, v vocabulary, n distinct context tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import jax
    from ed_models.protocol import LanguageModel
    from flax import nnx

Batch = Mapping[str, np.ndarray]

MAX_TOKENS = 200_000
"""Held-out tokens that are looked at: enough for three figures after the point."""
_LOGITS_AT_ONCE = 1 << 24


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """The text of tokens."""
        ...


@dataclass(frozen=True)
class Learned:
    """The figures.

    Attributes:
        tokens: held-out tokens that were predicted.
        cross_entropy: of the model, nats per token.
        unigram: entropy of the tokens' frequencies, nats per token.
        one_token: of the model with one token of context, nats per token.
        bits_per_byte: of the model, over the bytes that the tokens stand for.
    """

    tokens: int
    cross_entropy: float
    unigram: float
    one_token: float
    bits_per_byte: float

    def to_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def measure(
    model: LanguageModel,
    batches: Iterable[Batch],
    tokenizer: Decoder,
) -> Learned | None:
    """Evaluate a causal language model on batches; None when they predict nothing.

    Args:
        model: the model.
        batches: as the trainers take them; see `docs/data.md`.
        tokenizer: to count the bytes that tokens stand for.
    """
    score = _full_context(model)
    total, contexts, targets, size = 0.0, [], [], 0
    for batch in batches:
        logp, target, weight = score(batch)
        kept = weight > 0
        total -= float(logp[kept].sum())
        contexts.append(batch["input_ids"][kept])
        targets.append(target[kept])
        size += int(kept.sum())
        if size >= MAX_TOKENS:
            break
    if size == 0:
        return None
    context, target = np.concatenate(contexts), np.concatenate(targets)
    _, counts = np.unique(target, return_counts=True)
    share = counts / size
    return Learned(
        tokens=size,
        cross_entropy=total / size,
        unigram=float(-(share * np.log(share)).sum()),
        one_token=float(-_one_token(model, context, target).mean()),
        bits_per_byte=total / math.log(2) / max(1, _byte_count(tokenizer, targets)),
    )


def _full_context(model: LanguageModel) -> Callable[[Batch], tuple[np.ndarray, ...]]:
    """A function from a batch to (log-probabilities, targets, weights), each [b, s]."""
    import jax
    from ed_layers.losses import token_logprobs
    from ed_models.tasks.causal_lm import next_token_targets
    from flax import nnx

    graphdef, state, other = model.split_module()

    @jax.jit
    def score(
        state: nnx.State, other: nnx.State, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        module: LanguageModel = nnx.merge(graphdef, state, other)
        segments = batch["segment_ids"]
        target, weight = next_token_targets(batch["labels"], segments)
        hidden: jax.Array | None = module(
            batch["input_ids"],
            segment_ids=segments,
            position_ids=batch["position_ids"],
            logits_at="none",
        ).last_hidden_state
        assert hidden is not None, "a module always returns it"
        rows = hidden.reshape(-1, hidden.shape[-1])
        logp, _ = token_logprobs(rows, module.head(), target.reshape(-1))
        return logp.reshape(target.shape), target, weight

    needed = ("input_ids", "labels", "segment_ids", "position_ids")
    return lambda batch: jax.device_get(score(state, other, {k: batch[k] for k in needed}))


def _one_token(model: LanguageModel, context: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Log-probability of each target after its context token alone, [tokens]."""
    import jax
    from flax import nnx

    graphdef, state, other = model.split_module()

    @jax.jit
    def table(state: nnx.State, other: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state, other)(tokens[:, None]).logits[:, 0]
        return jax.nn.log_softmax(logits, axis=-1)

    distinct, place = np.unique(context, return_inverse=True)
    rows = max(1, min(len(distinct), _LOGITS_AT_ONCE // model.config.vocab_size))
    out = np.empty(len(target), np.float32)
    for start in range(0, len(distinct), rows):
        part = np.resize(distinct[start : start + rows], rows)  # one shape, one program
        here = (place >= start) & (place < start + rows)
        logp = np.asarray(table(state, other, part.astype(np.int32)))
        out[here] = logp[place[here] - start, target[here]]
    return out


def _byte_count(tokenizer: Decoder, targets: list[np.ndarray]) -> int:
    """Bytes of the text that tokens stand for; special tokens stand for none."""
    texts = (tokenizer.decode(part.tolist(), skip_special_tokens=True) for part in targets)
    return sum(len(text.encode("utf-8")) for text in texts)
