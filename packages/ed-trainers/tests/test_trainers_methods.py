"""What holds for every method of given rows: packing, microbatches, meshes, chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import EmbeddingOutput, SequenceClassifierOutput
from ed_models.tasks.pooling import Pooling
from ed_trainers import arguments_class, trainer_class
from ed_trainers.arguments import METHODS
from ed_trainers.losses import neftune
from encoder_runs import CASES, build_encoder
from flax import nnx
from method_runs import Pairs, apart, documents, near, near_reports, one_step, packed
from pydantic import ValidationError

ONE = (1, 1, 1, 1, 1)
ENCODERS = (TaskType.MASKED_LM, TaskType.TOKEN_CLASSIFICATION)


def labelled(**values):
    """Rows with one to three documents, and values of each document."""
    random = np.random.default_rng(3)
    rows = []
    for row in range(8):
        count = 1 + row % 3
        rows.append(documents(random, count, good=random.random(count) < 0.5))
    made = {name: [[of(random) for _ in inside] for inside in rows] for name, of in values.items()}
    return packed(rows, **made)


def steps():
    """Labels of steps at some tokens of the answers."""
    batch = labelled(step_labels=lambda random: float(random.random() < 0.5))
    ends = np.random.default_rng(1).random(batch["labels"].shape) < 0.5
    kept = (batch["labels"] != -100) & ends
    return {**batch, "step_labels": np.where(kept, batch["step_labels"], -100.0)}


def renamed(batch, names):
    for old, new in names.items():
        batch = {k.replace(old, new): v for k, v in batch.items()}
    return batch


def margins(batch):
    random = np.random.default_rng(2)
    margin = np.full(batch["chosen_labels"].shape, -100.0, np.float32)
    for row, ids in enumerate(batch["chosen_segment_ids"]):
        for number in range(1, ids.max() + 1):
            margin[row, ids == number] = random.random()
    return {**batch, "margin": margin}


def triples():
    """Pairs with a third answer of other lengths."""
    third = renamed(Pairs(seed=1).batch_at(0), {"chosen": "reference"})
    return {**Pairs().batch_at(0), **{n: x for n, x in third.items() if n.startswith("reference")}}


BATCHES = {
    "text": labelled,
    "preference": lambda: Pairs().batch_at(0),
    "gold_preference": triples,
    "reward": lambda: margins(Pairs().batch_at(0)),
    "labelled": lambda: labelled(label=lambda random: float(random.random() < 0.5)),
    "steps": steps,
    "embedding": lambda: renamed(Pairs().batch_at(0), {"chosen": "anchor", "rejected": "positive"}),
}
LEADS = {
    "preference": ("chosen", "rejected"),
    "gold_preference": ("chosen", "rejected", "reference"),
    "reward": ("chosen", "rejected"),
    "embedding": ("anchor", "positive"),
}
#: Methods that sample, or that train encoders, have separate tests.
GIVEN = [
    name for name, entry in METHODS.items() if entry.rows in BATCHES and entry.task not in ENCODERS
]
OPTIONS = {
    "distillation": {"beta": 0.3},
    "embedding": {"temperature": [0.5, 0.2], "matryoshka_dims": [8, 16]},
}


@pytest.fixture
def step(toy):
    """`step(method, batch, accumulation, dims)`: what moved, and the report."""

    class Scorer(toy.Model):
        def __init__(self, config, labels, **given):
            super().__init__(config, **given)
            values = jax.random.normal(jax.random.key(3), (self.norm.shape[0], labels))
            self.score = nnx.Param(values, axes=("embed", None))

        def __call__(self, input_ids, *, logits_at, **inputs):
            assert logits_at == "all"
            hidden = super().__call__(input_ids, **inputs).last_hidden_state
            return SequenceClassifierOutput(logits=hidden @ self.score[...])

    class Embedder(toy.Model):
        def __call__(self, input_ids, *, segment_ids, segments, **inputs):
            body = super().__call__(input_ids, segment_ids=segment_ids, **inputs)
            vectors = Pooling.of("mean").pool_segments(
                body.last_hidden_state, segment_ids, segments
            )
            return EmbeddingOutput(embeddings=vectors)

    def model(method, dims):
        entry, config = METHODS[method], toy.Config(dims)
        if entry.labels is not None:
            return Scorer(config, entry.labels).shard_model()
        kind = Embedder if entry.rows == "embedding" else toy.Model
        return kind(config).shard_model()

    def step(method, batch, accumulation=1, dims=ONE, **given):
        entry = METHODS[method]
        if method in CASES:
            learner, tokenizer = build_encoder(method, dims=dims), CASES[method].tokenizer
            return one_step(method, learner, batch, accumulation, {}, tokenizer, **given)
        others = (*entry.needs, *(name for name in entry.may_read if name == "reference"))
        frozen = {name: toy.model(dims, seed=5) for name in others}
        options = {**OPTIONS.get(method, {}), **given}
        return one_step(method, model(method, dims), batch, accumulation, frozen, **options)

    return step


@pytest.fixture(scope="module")
def batches():
    return {rows: make() for rows, make in BATCHES.items()}


@pytest.mark.daily("sft")
@pytest.mark.parametrize("method", GIVEN)
def test_microbatches_and_meshes_equal_the_whole_on_one_device(step, batches, method):
    batch = batches[METHODS[method].rows]
    moved, report = step(method, batch)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4, "or nothing is tested"
    accumulation = 1 if method == "embedding" else 4
    for dims in (ONE, (2, 2, 1, 2, 1)):
        other, other_report = step(method, batch, accumulation, dims)
        near(other, moved, 2e-5)
        near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(8, 1, 1, 1, 1), (1, 8, 1, 1, 1), (1, 2, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("method", GIVEN)
def test_every_mesh_equals_one_device(step, batches, method, dims):
    batch = batches[METHODS[method].rows]
    accumulation = 1 if method == "embedding" or dims[0] * dims[1] == 8 else 2
    moved, report = step(method, batch)
    other, other_report = step(method, batch, accumulation, dims)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", [name for name in GIVEN if name != "kto"])
def test_packed_method_step_matches_separate_rows(step, batches, method):
    rows = METHODS[method].rows
    batch = batches[rows]
    moved, report = step(method, batch)
    alone, alone_report = step(method, apart(batch, LEADS.get(rows, ("",))))
    near(alone, moved, 2e-5)
    near_reports(alone_report, report, 2e-5)


@pytest.mark.nightly
def test_packed_kto_step_matches_separate_rows(step, batches):
    batch = batches["labelled"]
    moved, _ = step("kto", batch, loss_type="apo_zero_unpaired")
    alone, _ = step("kto", apart(batch, ("",)), loss_type="apo_zero_unpaired")
    near(alone, moved, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [n for n in GIVEN if "lmhead_chunksize" in METHODS[n].arguments.model_fields]
)
def test_chunked_method_loss_matches_unchunked_loss(step, batches, method):
    batch = batches[METHODS[method].rows]
    near(step(method, batch, lmhead_chunksize=7)[0], step(method, batch)[0], 2e-5)


@pytest.mark.daily("dpo", "orpo", "distillation")
@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "distillation"])
def test_chunked_loss_never_materializes_full_logits(toy, batches, method):
    """No array of the whole step's tokens times the vocabulary, forwards and backwards."""
    entry = METHODS[method]
    frozen = {name: toy.model(seed=5) for name in (*entry.needs, *entry.may_read)}
    arguments = arguments_class(method)(total_batch_size=8, lmhead_chunksize=8)
    trainer = trainer_class(method)(arguments, toy.model(), frozen=frozen)
    prepared = trainer.prepare(batches[entry.rows])
    graphdef, params, other = trainer.model.split_module()

    def objective(params):
        from ed_trainers import Models

        models = Models(nnx.merge(graphdef, params, other), frozen)
        return trainer.loss(models, prepared, None).sums["main_loss"].sum

    text = str(jax.make_jaxpr(jax.grad(objective))(params))
    tokens = prepared["input_ids"].size
    shape = prepared["input_ids"].shape
    assert f"f32[8,{toy.vocab}]" in text, "a chunk's logits, or nothing is tested"
    for full in (f"[{tokens},{toy.vocab}]", f"[{shape[0]},{shape[-1]},{toy.vocab}]"):
        assert full not in text
    assert f",8,{toy.vocab}]" not in text, "nor the chunks' logits one after the other"


NOISY = [n for n in GIVEN if "neftune_noise_alpha" in METHODS[n].arguments.model_fields]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(n, marks=() if n in ("dpo", "reward", "embedding") else pytest.mark.nightly)
        for n in NOISY
    ],
)
def test_noise_on_embeddings_reaches_the_learner(step, batches, monkeypatch, method):
    def table(model):
        return lambda ids: model.embed_tokens[...].astype(jnp.float32)[ids]

    if method not in CASES:
        monkeypatch.setattr(neftune, "token_table", table)
    batch = batches[METHODS[method].rows]
    plain, report = step(method, batch)
    noisy, noisy_report = step(method, batch, neftune_noise_alpha=5.0)
    leaves, others = jax.tree.leaves(noisy), jax.tree.leaves(plain)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any(np.max(np.abs(a - b)) > 1e-5 for a, b in zip(leaves, others, strict=True))
    assert noisy_report["loss"] != report["loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("method", GIVEN)
def test_a_running_mean_and_eight_bits_of_moments_are_of_every_method(step, batches, method):
    batch = batches[METHODS[method].rows]
    moved, report = step(method, batch)
    mean, mean_report = step(method, batch, ema_decay=0.9)
    near(mean, moved)
    near_reports(mean_report, report)
    moments = {"optimizer": "adamw_8bit", "learning_rate": 1e-2, "skip_bad_steps": True}
    packed, packed_report = step(method, batch, **moments)
    assert packed_report["loss"] == pytest.approx(report["loss"], rel=1e-6)
    assert packed_report["skipped"] == 0
    assert any(np.max(np.abs(leaf)) > 1e-3 for leaf in jax.tree.leaves(packed))


def test_methods_without_neftune_reject_its_option():
    for name, entry in METHODS.items():
        if "neftune_noise_alpha" not in entry.arguments.model_fields:
            with pytest.raises(ValidationError, match="neftune_noise_alpha"):
                arguments_class(name)(neftune_noise_alpha=5.0)


def test_rows_that_are_not_of_the_method_are_refused(toy):
    text = labelled()
    for method, words in [
        ("dpo", "chosen_input_ids and rejected_input_ids"),
        ("kto", "completion and label"),
        ("reward", "chosen_input_ids"),
        ("prm", r"labels \(one per step\)"),
        ("embedding", "anchor_input_ids and positive_input_ids"),
        ("seq_kd", "batches of prompts"),
    ]:
        frozen = {name: toy.model() for name in METHODS[method].needs}
        trainer = trainer_class(method)(arguments_class(method)(), toy.model(), frozen=frozen)
        with pytest.raises(ConfigError, match=words):
            trainer.prepare(text)


def test_models_that_are_not_of_the_method_are_refused(toy, batches):
    trainer = trainer_class("distillation")(
        arguments_class("distillation")(), toy.model(), frozen={"teacher": toy.model()}
    )
    other = toy.model()
    other.kernel = nnx.Param(jnp.zeros((16, 40)), axes=("embed", "vocab"))
    from ed_trainers import Models

    prepared = trainer.prepare(batches["text"])
    with pytest.raises(ConfigError, match="the teacher has 40 tokens, the student 32"):
        trainer.loss(Models(toy.model(), {"teacher": other}), prepared, None)


def test_options_that_contradict_each_other():
    for method, given, words in [
        ("cpo", {"loss_type": "hinge", "label_smoothing": 0.1}, "no effect with loss_type"),
        ("orpo", {"beta": 0.1, "lambda_orpo": 0.2}, "two names of one option"),
        ("embedding", {"gradient_accumulation_steps": 2}, "only within a microbatch"),
        ("embedding", {"matryoshka_dims": [8], "matryoshka_weights": [1, 2]}, "one per dimension"),
        ("distillation", {"hidden_state_layers": [1]}, "no hidden states are compared"),
        ("distillation", {"attention_layers": [1]}, "no attention is compared"),
        ("distillation", {"alpha": 1.5}, "less than or equal to 1"),
        ("kto", {"loss_type": "ktoo"}, "did you mean 'kto'"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class(method)(**given)
    assert arguments_class("orpo")(lambda_orpo=0.3).beta == 0.3
    assert arguments_class("simpo")(gamma=1.0).simpo_gamma == 1.0
