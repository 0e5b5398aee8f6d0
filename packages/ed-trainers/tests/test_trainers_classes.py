"""Properties of the methods that train classifiers of words and of texts."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_trainers import arguments_class, trainer_class
from ed_trainers.losses.entities import EntityTags, entity_metrics
from method_runs import StopAt, near, near_reports, one_step, rows_of
from pydantic import ValidationError

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "S-PER")


def entities(tags):
    """Return the entities of a document as (type, first, last), as seqeval's `get_entities`."""
    found, begin = [], 0
    before, kind_before = "O", ""
    for i, name in enumerate([*tags, "O"]):
        tag, _, kind = name.partition("-")
        ends = before in "ES" or (before in "BI" and tag in "BSO")
        if ends or (before != "O" and kind_before != kind):
            found.append((kind_before, begin, i - 1))
        begins = tag in "BS" or (before in "ESO" and tag in "EI")
        if begins or (tag != "O" and kind_before != kind):
            begin = i
        before, kind_before = tag, kind
    return [entity for entity in found if entity[0]]


def test_entity_metrics_of_packed_documents_equal_those_of_seqeval():
    random = np.random.default_rng(0)
    b, s = 16, 48
    segments = np.sort(random.integers(1, 5, (b, s)), axis=1)
    segments[:, 40:] = 0
    true = random.integers(0, len(NAMES), (b, s))
    found = np.where(random.random((b, s)) < 0.8, true, random.integers(0, len(NAMES), (b, s)))
    here = (random.random((b, s)) < 0.7) & (segments > 0)
    tags = EntityTags.of(dict(enumerate(NAMES)))
    assert tags is not None
    made = entity_metrics(tags, *map(jnp.asarray, (found, true, here, segments)))
    correct = of_found = of_true = 0
    for row in range(b):
        for number in range(1, 5):
            at = here[row] & (segments[row] == number)
            ours, theirs = ({*entities([NAMES[i] for i in x[row][at]])} for x in (found, true))
            correct += len(ours & theirs)
            of_found, of_true = of_found + len(ours), of_true + len(theirs)
    assert correct > 20
    assert float(made["precision"].value) == pytest.approx(correct / of_found)
    assert float(made["recall"].value) == pytest.approx(correct / of_true)
    assert float(made["f1"].value) == pytest.approx(2 * correct / (of_found + of_true))


def test_names_that_are_not_tags_have_no_entities():
    for names in (("LABEL_0", "LABEL_1"), ("O", "O"), ("NOUN", "VERB"), ("B", "I")):
        assert EntityTags.of(dict(enumerate(names))) is None


def test_classes_are_set_once():
    kind = arguments_class("token_classification")
    with pytest.raises(ValidationError, match="num_labels is 3, and label_names has 2"):
        kind(label_names=["a", "b"], num_labels=3)
    with pytest.raises(ValidationError, match="each class needs a different name"):
        kind(label_names=["a", "a"])
    assert kind(label_names=["a", "b"]).config_fields["id2label"] == {0: "a", 1: "b"}
    assert kind(num_labels=4).config_fields == {"num_labels": 4}
    assert kind().config_fields == {}


def tiny(task, dims=(1, 1, 1, 1, 1), dropout=0.1):
    config = registry.get_config("bert")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        id2label={0: "O", 1: "B-X", 2: "I-X"},
        sharding_axis_dims=dims,
    )
    return registry.get_module(task, "bert").create(config, seed=0)


class Words:
    """Packed rows of words with labels."""

    task = TaskType.TOKEN_CLASSIFICATION
    steps_per_epoch, fingerprint = 3, "words"

    def batch_at(self, step):
        random = np.random.default_rng(step % self.steps_per_epoch)
        ids = random.integers(5, 64, (8, 24)).astype(np.int32)
        segments = np.where(np.arange(24) < random.integers(4, 12, (8, 1)), 1, 2)
        segments[:, 20:] = 0
        labels = np.where((random.random((8, 24)) < 0.7) & (segments > 0), ids % 3, -100)
        return {"input_ids": ids, "segment_ids": segments.astype(np.int32), "labels": labels}


class Texts(Words):
    """Rows of pairs of texts with one label each."""

    task = TaskType.SEQUENCE_CLASSIFICATION
    fingerprint = "texts"

    def batch_at(self, step):
        batch = super().batch_at(step)
        types = (batch["segment_ids"] == 2).astype(np.int32)
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": (batch["segment_ids"] > 0).astype(np.int32),
            "token_type_ids": types,
            "labels": batch["input_ids"][:, 0] % 3,
        }


DATA = {"token_classification": Words(), "sequence_classification": Texts()}


@pytest.mark.nightly
@pytest.mark.parametrize("method", DATA)
def test_microbatches_and_meshes_equal_the_whole_step(method):
    data = DATA[method]
    batch = data.batch_at(0)
    moved, report = one_step(method, tiny(data.task, dropout=0.0), batch)
    for dims, parts in (((1, 1, 1, 1, 1), 4), ((2, 2, 1, 2, 1), 2)):
        other, other_report = one_step(method, tiny(data.task, dims, 0.0), batch, parts)
        near(other, moved, 2e-5)
        near_reports(other_report, report, 2e-5)


def run(method, directory, **options):
    data = DATA[method]
    arguments = arguments_class(method)(
        save_directory=str(directory),
        total_batch_size=8,
        max_training_steps=6,
        learning_rate=1e-2,
        log_steps=1,
        save_steps=2,
        evaluation_steps=3,
        use_tensorboard=False,
    )
    trainer_class(method)(arguments, tiny(data.task), data, data, **options).train()


@pytest.mark.nightly
@pytest.mark.parametrize("method", DATA)
def test_resumed_classifier_equals_uninterrupted_run(method, tmp_path):
    run(method, tmp_path / "whole")
    run(method, tmp_path / "parts", callbacks=[StopAt(4)])
    run(method, tmp_path / "parts")
    rows = rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows
    evaluated = [row for row in rows if "eval_accuracy" in row]
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert ("eval_f1" in evaluated[-1]) == (method == "token_classification")
    saved = json.loads((tmp_path / "whole" / "model" / "config.json").read_text())
    assert saved["id2label"] == {"0": "O", "1": "B-X", "2": "I-X"}


@pytest.mark.nightly
def test_label_beyond_the_classes_of_the_model_is_rejected():
    trainer = trainer_class("token_classification")(
        arguments_class("token_classification")(), tiny(TaskType.TOKEN_CLASSIFICATION)
    )
    batch = Words().batch_at(0)
    with pytest.raises(ConfigError, match="the label 3 is invalid: the model has 3 classes"):
        trainer.prepare({**batch, "labels": np.where(batch["labels"] == 2, 3, batch["labels"])})
    with pytest.raises(ConfigError, match="a batch of a classifier has labels"):
        trainer.prepare({"input_ids": batch["input_ids"]})
