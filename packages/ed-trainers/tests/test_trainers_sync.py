"""A reference that follows the learner (`sync_ref_model`): when it moves, and that it survives."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.arguments import METHODS, idle_options
from ed_trainers.online.phase import Phase
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.step import build_train_step
from flax import nnx
from method_runs import Pairs, StopAt, near, near_reports, one_step, rows_of
from online_runs import online, phase_of
from pydantic import ValidationError

SYNCED = [
    name for name, entry in METHODS.items() if "sync_ref_model" in entry.arguments.model_fields
]
MOVES = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 2}
STEPS = 7
#: Methods that compare completions of the learner with those of the reference, once each.
COMPETES = ("xpo", "nash_md")


def pairs(directory, model, *, method="dpo", data=None, frozen=None, callbacks=(), **given):
    arguments = arguments_class(method)(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": STEPS,
            "learning_rate": 2e-2,
            "log_steps": 1,
            "use_tensorboard": False,
            "progress_bar_type": "none",
            "do_last_save": False,
            **MOVES,
            **given,
        }
    )
    held_out = None
    if data is None:
        held_out = Pairs(seed=9)
        held_out.steps_per_epoch = 1
    return trainer_class(method)(
        arguments, model, data or Pairs(), held_out, frozen=frozen or {}, callbacks=callbacks
    )


def arrays(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def same(left, right):
    for a, b in zip(arrays(left), arrays(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    run = pairs(directory, toy.model(), frozen={"reference": toy.model(seed=5)})
    return run, run.train(), rows_of(directory)


@pytest.mark.proves("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
@pytest.mark.parametrize(
    "dims",
    [(1, 1, 1, 1, 1), pytest.param((2, 2, 1, 2, 1), marks=pytest.mark.nightly)],
    ids=str,
)
@pytest.mark.nightly
def test_reference_sync_follows_configured_steps(toy, dims):
    """Each step equals numpy mixtures, and the loss with a reference of these weights."""
    given = toy.model(dims, seed=5)
    kept = arrays(nnx.state(given))
    run = pairs("unused", toy.model(dims), frozen={"reference": given}, optimizer="sgd")
    schedule = build_schedule(run.arguments, STEPS)
    state = run._first_state().init_tx(build_optimizer(run.arguments, schedule))
    step = build_train_step(state, run.method, schedule, rows=4, seed=0)
    treedef, leaves = jax.tree.structure(state), tuple(jax.tree.leaves(state))
    wanted = arrays(state.reference)
    batch = run.prepare(Pairs().batch_at(0))
    placed = run.placement.place(microbatches(batch, 2), stacked=True)
    margins = []
    for done in range(1, 5):
        leaves, report = step(leaves, placed)
        state = jax.tree.unflatten(treedef, leaves)
        margins.append(float(report["rewards/margins"]))
        if done % 2 == 0:
            mixed = zip(arrays(state.graphstate), wanted, strict=True)
            wanted = [np.float32(0.6) * own + np.float32(0.4) * old for own, old in mixed]
        for a, b in zip(arrays(state.reference), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    copied = jax.tree.map(jax.numpy.copy, (state.graphstate, state.reference))
    learner, moved = toy.model(dims), toy.model(dims)
    nnx.update(learner, copied[0])
    nnx.update(moved, copied[1])
    _, report = step(leaves, placed)
    _, alone = one_step("dpo", learner, Pairs().batch_at(0), 2, {"reference": moved})
    assert float(report["rewards/margins"]) == pytest.approx(alone["rewards/margins"], rel=1e-5)
    assert abs(alone["rewards/margins"]) < 0.7 * abs(margins[-1]), "or it did not come nearer"
    for a, b in zip(arrays(nnx.state(given)), kept, strict=True):
        np.testing.assert_array_equal(a, b)  # the model that was given stays as it was


@pytest.mark.nightly
def test_a_run_that_is_stopped_between_two_moves_goes_on_bit_for_bit(toy, whole, tmp_path):
    run, output, rows = whole
    frozen = {"reference": toy.model(seed=5)}
    stopped = pairs(tmp_path, toy.model(), frozen=frozen, callbacks=[StopAt(2)])
    assert stopped.train().stopped_by == "the test"
    resumed = pairs(tmp_path, toy.model(), frozen=frozen)
    again = resumed.train()
    assert rows_of(tmp_path) == rows
    same(again.state, output.state)
    # Not where it began, and not the learner.
    for start, end, own in zip(
        *map(arrays, (frozen["reference"].split_module()[1], *both(output.state))), strict=True
    ):
        assert np.abs(end - start).max() > 1e-3 < np.abs(own - end).max()
    # An evaluation after training reads the moved reference.
    assert resumed.evaluate()["eval_loss"] == rows[-1]["eval_loss"]
    assert run.evaluate()["eval_loss"] == rows[-1]["eval_loss"]
    with pytest.raises(CheckpointError, match="sync_ref_model True, now it is False"):
        pairs(tmp_path, toy.model(), frozen=frozen, sync_ref_model=False).train()


def both(state):
    return state.reference, state.graphstate


@pytest.mark.nightly
def test_microbatches_and_meshes_do_not_matter(toy, whole, tmp_path):
    output = whole[1]
    frozen = {"reference": toy.model((2, 2, 1, 2, 1), seed=5)}
    many = pairs(
        tmp_path, toy.model((2, 2, 1, 2, 1)), frozen=frozen, gradient_accumulation_steps=2
    ).train()
    near(arrays(many.state.reference), arrays(output.state.reference), 2e-5)


@pytest.mark.nightly
def test_initial_learner_is_copied_once_as_reference(toy, tmp_path):
    model = toy.model()
    start = arrays(nnx.state(model))
    run = pairs(tmp_path, model, ref_model_sync_steps=100)
    assert not run.method.frozen.fixed, "the state has the only copy"
    output = run.train()
    same(output.state.reference, start)
    assert output.metrics["train_loss"] < np.log(2) - 1e-3


def build_online_options(method):
    """Return the options of a method that samples, whose reference follows the learner."""
    own = {} if method in COMPETES else {"num_iterations": 2}
    if method == "sdpo":  # its usual teacher, a running mean, follows the learner itself
        own |= {"teacher_model_kind": "base", "distillation_weight": 0.5}
    return {"num_train_epochs": 1, "beta": 0.1, "learning_rate": 0.3, **MOVES, **own}


@pytest.mark.parametrize("method", SYNCED[3:])
def test_each_method_that_samples_accepts_a_synced_reference(method):
    assert arguments_class(method)(**build_online_options(method)).sync_ref_model


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [pytest.param(n, marks=() if n == "grpo" else pytest.mark.nightly) for n in SYNCED[3:]],
)
def test_online_method_reads_synced_reference_and_resumes(toy, tmp_path, method, monkeypatch):
    """A method that samples reads the present reference, and resumes within a generation."""
    competes = method in COMPETES
    more = build_online_options(method)

    def run(directory, *callbacks):
        made = online(
            method, toy.model(), tmp_path / directory, generations=3, callbacks=callbacks, **more
        )
        if competes:
            phase_of(made).build_rollout = lambda make: made.method.rollout
        return made

    first = run("whole")
    moved = []
    asked = Phase.ask

    def watched(self, question, *given):
        if self.run is first.method:
            moved.append(arrays(self.run.frozen.following.present()))
        return asked(self, question, *given)

    monkeypatch.setattr(Phase, "ask", watched)
    output = first.train()
    assert len(moved) >= 3
    assert np.abs(moved[-1][0] - moved[0][0]).max() > 1e-4, "or it did not move"
    run("parts", StopAt(2)).train()
    again = run("parts").train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    same(again.state, output.state)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["kto", "bco"])
def test_reference_sync_works_for_labelled_answers(toy, tmp_path, method):
    class Labelled(Pairs):
        def batch_at(self, step):
            batch = super().batch_at(step)
            rows = {n.removeprefix("chosen_"): x for n, x in batch.items() if "chosen" in n}
            good = np.random.default_rng(step).random(rows["labels"].shape[0]) < 0.5
            label = np.where(rows["segment_ids"] > 0, good[:, None].astype(np.float32), -100.0)
            return {**rows, "label": label}

    def run(directory, *callbacks, **given):
        return pairs(
            tmp_path / directory,
            toy.model(),
            method=method,
            data=Labelled(),
            callbacks=callbacks,
            **given,
        )

    output = run("whole").train()
    run("parts", StopAt(3)).train()
    again = run("parts").train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    same(again.state, output.state)
    still = run("still", ref_model_sync_steps=100).train()
    assert still.metrics["train_loss"] != output.metrics["train_loss"]


def llama(scan=True, **given):
    fields = {"num_hidden_layers": 2, "vocab_size": 32, "scan_layers": scan}
    fields = tiny_llama(**{**fields, "sharding_axis_dims": (1, 1, 1, 1, 1), **given})
    del fields["model_type"]
    return LlamaForCausalLM.create(LlamaConfig(**fields))


@pytest.mark.nightly
def test_synced_reference_resumes_in_other_layout_and_mesh(tmp_path):
    rules = [["embed_tokens", False], ["", True]]
    whole = pairs(tmp_path / "whole", llama(), trainable_rules=rules).train()
    pairs(tmp_path / "parts", llama(), trainable_rules=rules, callbacks=[StopAt(3)]).train()
    other = llama(scan=False, sharding_axis_dims=(1, 2, 1, 2, 1))
    again = pairs(tmp_path / "parts", other, trainable_rules=rules).train()
    for row, wanted in zip(rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole"), strict=True):
        near_reports(row, wanted, 2e-5)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(whole.state.reference)}
    assert names and not any("embed_tokens" in name for name in names), "what learns follows"
    assert again.state.reference is not None


@pytest.mark.nightly
def test_invalid_sync_options_raise_error(toy, tmp_path):
    for method, given, words in [
        ("dpo", {"precompute_ref_log_probs": True}, "it cannot be computed in advance"),
        ("dpo", {"reference_free": True}, "no reference that could move"),
        ("grpo", {"beta": 0}, "with beta 0 there is no reference"),
        ("kto", {"ref_model_mixup_alpha": 0}, "greater than 0"),
        ("sft", {}, "sync_ref_model"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class(method)(sync_ref_model=True, **given)
    for method in SYNCED:
        idle = dict(idle_options(arguments_class(method)(ref_model_sync_steps=3)))
        assert idle["ref_model_sync_steps"] == "sync_ref_model is false"
    model = llama()
    with pytest.raises(ConfigError, match=r"lm_head.*of the learner's architecture"):
        pairs(tmp_path, model, frozen={"reference": llama(tie_word_embeddings=True)})
    with pytest.raises(ConfigError, match="the reference of a model with adapters is its own base"):
        pairs(tmp_path, model.apply_lora(LoraSpec(rank=2)))
