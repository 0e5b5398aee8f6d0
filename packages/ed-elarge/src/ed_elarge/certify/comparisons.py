"""Comparisons of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ed_elarge.certify.outcome import require_claim

#: Largest difference of logits, relative to the largest logit.
LOGITS_LIMIT = 1e-3
#: Largest mean divergence of a quantized model from the model in full precision, in nats.
DIVERGENCE_LIMIT = 0.1
#: Smallest share of positions with equal first choices of the two.
AGREEMENT_LIMIT = 0.5
#: Number of tokens that are compared.
LENGTH = 96


def compute_logits(model: Any, ids: np.ndarray, **inputs: Any) -> np.ndarray:
    """Return the logits of one row, float32 [s, v].

    Args:
        ids: tokens, int [s].
        inputs: further arrays of the model, [1, s].
    """
    output = model(input_ids=ids[None].astype(np.int32), **inputs)
    return np.asarray(output.logits, np.float32)[0]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare_logits(
    model_logits: np.ndarray, reference_logits: np.ndarray, name: str, limit: float
) -> str:
    """Return the largest difference of logits as a text, or raise `Failed` above the limit."""
    width = min(model_logits.shape[-1], reference_logits.shape[-1])  # padded vocabularies
    model_logits, reference_logits = model_logits[..., :width], reference_logits[..., :width]
    error = float(
        np.abs(model_logits - reference_logits).max() / max(np.abs(reference_logits).max(), 1e-30)
    )
    require_claim(error <= limit, f"logits differ by {error:.1e} of the largest logit from {name}")
    return f"largest difference {error:.1e} of the largest logit"


def compare_distributions(model_logits: np.ndarray, exact: np.ndarray, name: str) -> str:
    """Return divergence and agreement of logits [s, v] as a text, or raise `Failed`."""
    width = min(model_logits.shape[-1], exact.shape[-1])
    ours, theirs = (log_softmax(logits[..., :width]) for logits in (model_logits, exact))
    divergence = float((np.exp(theirs) * (theirs - ours)).sum(-1).mean())
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    evidence = f"KL divergence {divergence:.2e} nats, {agreement:.0%} equal first choices"
    require_claim(
        divergence <= DIVERGENCE_LIMIT and agreement >= AGREEMENT_LIMIT,
        f"{evidence} against {name}",
    )
    return evidence
