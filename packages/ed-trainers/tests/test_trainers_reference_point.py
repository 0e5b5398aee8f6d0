"""The reference point of `kto` and `bco` is that of the whole evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers import arguments_class, trainer_class
from method_runs import documents, packed

ROWS = 14


def rows_of_labels(per_row):
    """Rows with one to `per_row` labelled answers."""
    random = np.random.default_rng(3)
    rows = [
        documents(random, count, good=random.random(count) < 0.5)
        for count in (1 + row % per_row for row in range(ROWS))
    ]
    labels = [[float(random.random() < 0.5) for _ in inside] for inside in rows]
    return packed(rows, label=labels)


def cut(batch, size):
    """The same rows in batches of `size` rows; the last batch may be smaller."""
    return [
        {name: array[start : start + size] for name, array in batch.items()}
        for start in range(0, ROWS, size)
    ]


def evaluated(toy, method, batches, **options):
    arguments = arguments_class(method)(total_batch_size=8, beta=1.0, **options)
    frozen = {"reference": toy.model(seed=5)}
    return trainer_class(method)(arguments, toy.model(), None, batches, frozen=frozen).evaluate()


@pytest.mark.nightly
@pytest.mark.parametrize("per_row", [1, 3], ids=["alone", "packed"])
@pytest.mark.parametrize("method", ["kto", "bco"])
def test_eval_loss_does_not_depend_on_the_size_of_the_batches(toy, method, per_row):
    batch = rows_of_labels(per_row)
    whole = evaluated(toy, method, [batch])
    for size in (1, 2, 7):
        found = evaluated(toy, method, cut(batch, size))
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-6), size
        found = evaluated(toy, method, [batch], eval_batch_size=size)
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-6), size


@pytest.mark.nightly
def test_the_shift_is_half_way_between_the_mean_rewards_of_the_evaluation(toy):
    found = evaluated(toy, "bco", cut(rows_of_labels(3), 2))
    middle = (found["eval_rewards/chosen"] + found["eval_rewards/rejected"]) / 2
    assert found["eval_delta"] == pytest.approx(middle, rel=1e-5)


@pytest.mark.nightly
def test_answers_are_paired_with_other_prompts_over_the_ends_of_batches(toy):
    trainer = trainer_class("kto")(arguments_class("kto")(), toy.model())
    batch = rows_of_labels(1)
    pieces = list(trainer.method.held_out(cut(batch, 1), trainer._first_state()))
    whole = next(iter(trainer.method.held_out([batch], trainer._first_state())))
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces]), array)
    assert not whole["other_segment_ids"][0].any(), "nothing is before the first row"
    assert whole["other_segment_ids"][1:].any(axis=1).all()


def test_the_only_document_of_a_batch_is_not_paired_with_its_own_answer(toy):
    trainer = trainer_class("kto")(arguments_class("kto")(), toy.model())
    alone = trainer.prepare(cut(rows_of_labels(1), 1)[0])
    assert not alone["other_weights"].any()


@pytest.mark.parametrize("method", ["kto", "bco"])
def test_data_that_can_be_read_once_are_refused(toy, method):
    with pytest.raises(ConfigError, match="can be read only once"):
        evaluated(toy, method, iter([rows_of_labels(1)]))


@pytest.mark.nightly
def test_the_references_of_held_out_pairs_are_computed_ahead(toy, tmp_path):
    class Rows:
        steps_per_epoch = 3
        fingerprint = "rows"

        def batch_at(self, step):
            return cut(rows_of_labels(1), 4)[step]

    def run(ahead):
        arguments = arguments_class("kto")(
            save_directory=str(tmp_path / str(ahead)),
            total_batch_size=4,
            max_training_steps=2,
            evaluation_steps=1,
            precompute_ref_log_probs=ahead,
            use_tensorboard=False,
            do_last_save=False,
        )
        frozen = {"reference": toy.model(seed=5)}
        trainer = trainer_class("kto")(arguments, toy.model(), Rows(), Rows(), frozen=frozen)
        return trainer.train().metrics["eval_loss"]

    assert run(True) == pytest.approx(run(False), rel=1e-5)
