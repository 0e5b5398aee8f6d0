"""Held-out cross-entropy of a model, compared with two simple baselines.

All values are nats per token on the same held-out tokens: the model's cross-entropy, the entropy of
the token frequencies (the optimum of a unigram distribution), and the cross-entropy of the same
model with one token of context (comparable to a bigram table).

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

HeldoutBatch = Mapping[str, np.ndarray]

_MAX_TOKENS = 200_000
"""Maximum number of held-out tokens: enough for three decimal places."""
_LOGITS_AT_ONCE = 1 << 24


class TextDecoder(Protocol):
    """The part of a tokenizer that this module uses."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """Return the text of tokens."""
        ...


@dataclass(frozen=True)
class HeldoutMetrics:
    """Metrics of a model on held-out tokens.

    Attributes:
        tokens: Number of predicted held-out tokens.
        cross_entropy: Cross-entropy of the model, nats per token.
        unigram: Entropy of the token frequencies, nats per token.
        one_token: Cross-entropy with one token of context, nats per token.
        bits_per_byte: Cross-entropy of the model in bits per byte of text.
    """

    tokens: int
    cross_entropy: float
    unigram: float
    one_token: float
    bits_per_byte: float

    def to_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return asdict(self)


def measure_heldout(
    model: LanguageModel,
    batches: Iterable[HeldoutBatch],
    tokenizer: TextDecoder,
) -> HeldoutMetrics | None:
    """Evaluate a causal language model on batches, or return None if no token is predicted.

    Args:
        model: The model.
        batches: Training batches; see `docs/data.md`.
        tokenizer: The tokenizer, which converts tokens to bytes.
    """
    score = build_scorer(model)
    total, contexts, targets, size = 0.0, [], [], 0
    for batch in batches:
        logp, target, weight = score(batch)
        target_mask = weight > 0
        total -= float(logp[target_mask].sum())
        contexts.append(batch["input_ids"][target_mask])
        targets.append(target[target_mask])
        size += int(target_mask.sum())
        if size >= _MAX_TOKENS:
            break
    if size == 0:
        return None
    context, target = np.concatenate(contexts), np.concatenate(targets)
    _, counts = np.unique(target, return_counts=True)
    share = counts / size
    return HeldoutMetrics(
        tokens=size,
        cross_entropy=total / size,
        unigram=float(-(share * np.log(share)).sum()),
        one_token=float(-_one_token(model, context, target).mean()),
        bits_per_byte=total / math.log(2) / max(1, _byte_count(tokenizer, targets)),
    )


def build_scorer(model: LanguageModel) -> Callable[[HeldoutBatch], tuple[np.ndarray, ...]]:
    """Return a function from a batch to (log-probabilities, targets, weights), each [b, s]."""
    import jax
    from ed_layers.losses import token_logprobs
    from ed_models.tasks.causal_lm import next_token_targets
    from flax import nnx

    graphdef, state, other_state = model.split_module()

    @jax.jit
    def score(
        state: nnx.State, other_state: nnx.State, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        module: LanguageModel = nnx.merge(graphdef, state, other_state)
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
    return lambda batch: jax.device_get(score(state, other_state, {k: batch[k] for k in needed}))


def _one_token(model: LanguageModel, context: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the log-probability of each target given only its previous token, [tokens]."""
    import jax
    from flax import nnx

    graphdef, state, other_state = model.split_module()

    @jax.jit
    def table(state: nnx.State, other_state: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state, other_state)(tokens[:, None]).logits[:, 0]
        return jax.nn.log_softmax(logits, axis=-1)

    distinct, place = np.unique(context, return_inverse=True)
    rows = max(1, min(len(distinct), _LOGITS_AT_ONCE // model.config.vocab_size))
    out = np.empty(len(target), np.float32)
    for start in range(0, len(distinct), rows):
        part = np.resize(distinct[start : start + rows], rows)  # one shape: one compilation
        context_mask = (place >= start) & (place < start + rows)
        logp = np.asarray(table(state, other_state, part.astype(np.int32)))
        out[context_mask] = logp[place[context_mask] - start, target[context_mask]]
    return out


def _byte_count(tokenizer: TextDecoder, targets: list[np.ndarray]) -> int:
    """Return the number of bytes of the decoded tokens, without special tokens."""
    texts = (tokenizer.decode(part.tolist(), skip_special_tokens=True) for part in targets)
    return sum(len(text.encode("utf-8")) for text in texts)
