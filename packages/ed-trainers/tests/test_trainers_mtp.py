"""`mtp_loss_weight`: the loss of the MTP layer, packing, and which parameters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.contract import Models
from flax import nnx

WEIGHT = 0.3
RNG = np.random.default_rng(0)
FIRST, SECOND = (RNG.integers(3, 90, length).astype(np.int32) for length in (7, 5))
LABELS = np.where(np.arange(7) < 3, -100, FIRST)


def create(**fields: Any) -> Any:
    known = {**tiny_llama(vocab_size=96, initializer_range=0.2), "mtp_head": "new", **fields}
    known.pop("model_type")
    config = LlamaConfig(**known, sharding_axis_dims=(1, 1, 1, 1, 1))
    return LlamaForCausalLM.create(config, seed=1)


def measure(model: Any, batch: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return the sum and the weight of the term of the layer."""
    trainer = SFTTrainer(SFTArguments(mtp_loss_weight=WEIGHT), model=model)
    loss = trainer.loss(Models(model), trainer.prepare(batch), None).validate_terms()
    term = loss.sums["mtp_loss"]
    return float(term.sum), float(term.weight)


def compute_reference(model: Any, ids: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Return the cross-entropy of the layer for one document, and the number of its targets."""
    tokens = jnp.asarray(ids[None])
    hidden = model(tokens, logits_at="none").last_hidden_state[:, :-1]
    embeds = model.model.embed(tokens[:, 1:], None)
    output = model.mtp(inputs_embeds=embeds, hidden=hidden).last_hidden_state[0, :-1]
    logps = jax.nn.log_softmax(model.head()(output), axis=-1)
    places = [i for i, label in enumerate(labels[2:]) if label != -100]
    return -sum(float(logps[i, labels[i + 2]]) for i in places), len(places)


def pad(*documents: np.ndarray, fill: int = 0) -> np.ndarray:
    """Return one row of 16 tokens with the documents, one after another."""
    row = np.full((1, 16), fill, np.int32)
    row[0, : sum(map(len, documents))] = np.concatenate(documents)
    return row


@pytest.mark.nightly
def test_loss_of_packed_documents_is_that_of_the_definition() -> None:
    model = create()
    packed = {
        "input_ids": pad(FIRST, SECOND),
        "labels": pad(LABELS, SECOND, fill=-100),
        "segment_ids": pad(np.full(7, 1), np.full(5, 2)),
    }
    total, weight = measure(model, packed)
    references = [compute_reference(model, *one) for one in ((FIRST, LABELS), (SECOND, SECOND))]
    assert weight == sum(count for _, count in references) == 4 + 3
    expected = WEIGHT * sum(value for value, _ in references)
    assert total == pytest.approx(expected, rel=1e-5)


class Rows:
    """A loader that returns the same rows at each step."""

    steps_per_epoch = 4

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(0).integers(3, 90, (4, 16)).astype(np.int32)
        return {"input_ids": ids, "labels": ids, "segment_ids": np.ones_like(ids)}


def train(model: Any, folder: Path, **options: Any) -> dict[str, bool]:
    """Train two steps; return parameter name -> whether it has changed, for three parameters."""

    def read(model: Any) -> dict[str, np.ndarray]:
        arrays = {
            "layer": model.mtp.fc.kernel,
            "embedding": model.model.embed_tokens.embedding,
            "norm": model.mtp.norm.weight,
        }
        return {name: np.array(array[...]) for name, array in arrays.items()}

    before = read(model)
    arguments = SFTArguments(
        save_directory=str(folder),
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=0,
        use_tensorboard=False,
        **options,
    )
    trainer = SFTTrainer(arguments, model=model, train_dataset=Rows())
    trainer.train()
    after = read(trainer.model)
    return {name: not np.array_equal(before[name], after[name]) for name in before}


@pytest.mark.nightly
def test_layer_is_trained_with_the_model_alone_or_not_at_all(tmp_path: Path) -> None:
    both = train(create(), tmp_path / "both", mtp_loss_weight=WEIGHT)
    assert both == {"layer": True, "embedding": True, "norm": True}
    rules = (("^mtp", True),)
    alone = train(create(), tmp_path / "alone", mtp_loss_weight=1.0, trainable_rules=rules)
    assert alone == {"layer": True, "embedding": False, "norm": True}
    assert (tmp_path / "alone/model/config.json").is_file()
    # Weight decay must not change a layer that has no loss.
    without = train(create(), tmp_path / "without")
    assert without == {"layer": False, "embedding": True, "norm": False}


def test_model_without_layer_or_with_adapters_raises_error() -> None:
    arguments = SFTArguments(mtp_loss_weight=WEIGHT)
    with pytest.raises(ConfigError, match="mtp_head='stored', or with mtp_head='new'"):
        SFTTrainer(arguments, model=create(mtp_head=None))
    adapted = create().apply_lora(LoraSpec(rank=2))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam))]
    assert paths and not any(path[0] == "mtp" for path in paths)
    with pytest.raises(ConfigError, match="a model with adapters trains only these"):
        SFTTrainer(arguments, model=adapted)
