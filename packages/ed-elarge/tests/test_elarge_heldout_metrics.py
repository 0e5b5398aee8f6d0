"""Held-out metrics of the summary equal independently computed values."""

from __future__ import annotations

import numpy as np
import pytest
from ed_elarge.evaluation import heldout_metrics
from ed_infra.testing import tiny_llama


class Letters:
    """A tokenizer whose every token is one letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "x" * len(ids)


@pytest.mark.nightly
def test_figures_are_those_of_plain_logits() -> None:
    import jax
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    fields = tiny_llama(num_hidden_layers=2, vocab_size=64)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    model = LlamaForCausalLM.create(config, seed=1)
    random = np.random.default_rng(0)
    ids = random.integers(0, 64, (3, 10), dtype=np.int32)
    segments = np.array([[1] * 6 + [2] * 4, [1] * 10, [1] * 5 + [0] * 5], np.int32)
    positions = np.array([[*range(6), *range(4)], range(10), [*range(5)] + [0] * 5], np.int32)
    labels = np.where(segments > 0, ids, -100).astype(np.int32)
    labels[1, 3] = -100
    batch = {
        "input_ids": ids,
        "labels": labels,
        "segment_ids": segments,
        "position_ids": positions,
    }

    full, contexts, targets = [], [], []
    for row, start, stop in ((0, 0, 6), (0, 6, 10), (1, 0, 10), (2, 0, 5)):
        piece = np.zeros((1, 10), np.int32)  # what follows a causal model's token does not matter
        piece[0, : stop - start] = ids[row, start:stop]
        logp = jax.nn.log_softmax(model(piece).logits[0])
        for i in range(start, stop - 1):
            if labels[row, i + 1] >= 0:
                targets.append(labels[row, i + 1])
                contexts.append(ids[row, i])
                full.append(logp[i - start, targets[-1]])
    alone = jax.nn.log_softmax(model(np.array(contexts)[:, None]).logits[:, 0])
    single = [row[target] for row, target in zip(alone, targets, strict=True)]
    share = np.unique(targets, return_counts=True)[1] / len(targets)

    found = heldout_metrics.measure_heldout(model, [batch], Letters())
    assert found is not None
    assert found.tokens == len(targets) == 5 + 3 + 8 + 4
    assert found.cross_entropy == pytest.approx(-np.mean(full), rel=1e-5)
    assert found.one_token == pytest.approx(-np.mean(single), rel=1e-5)
    assert found.unigram == pytest.approx(-(share * np.log(share)).sum(), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(found.cross_entropy / np.log(2), rel=1e-6)


@pytest.mark.nightly
def test_nothing_to_predict_is_none() -> None:
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    fields = tiny_llama(num_hidden_layers=1, vocab_size=64)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    zeros = np.zeros((1, 4), np.int32)
    batch = dict.fromkeys(("input_ids", "segment_ids", "position_ids"), zeros)
    batch["labels"] = zeros - 100
    assert (
        heldout_metrics.measure_heldout(LlamaForCausalLM.create(config), [batch], Letters()) is None
    )
