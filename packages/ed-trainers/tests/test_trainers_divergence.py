"""Divergences of students and teachers: chunks equal the whole; noise on one side only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.sharding.mesh import create_mesh
from ed_layers.projections.head import Head
from ed_trainers import Models, arguments_class, trainer_class
from ed_trainers.losses import neftune, scoring
from ed_trainers.losses.divergence import token_divergences
from ed_trainers.losses.next_token import next_token_batch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from method_runs import documents, packed
from online_runs import online

D, VOCAB = 8, 48


def sides(rows, length, vocab=VOCAB):
    """Hidden states and heads of student and teacher, and targets."""
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = [jax.random.normal(key, (rows, length, D)) for key in keys[:2]]
    heads = [jax.random.normal(key, (D, vocab)) for key in keys[2:4]]
    return *zip(hidden, heads, strict=True), jax.random.randint(keys[4], (rows, length), 0, vocab)


def chunked(mesh, **options):
    """Loss and gradients of everything that has one, of the function under test."""
    spec = PartitionSpec(("dp", "fsdp"), "sp")

    def total(student, teacher, targets):
        (hidden, head), (other, of_other) = student, teacher
        divergence, logp = token_divergences(
            (hidden, Head(head)),
            (other, Head(of_other)),
            targets,
            sharding=NamedSharding(mesh, spec),
            **options,
        )
        return jnp.sum(divergence - 0.5 * logp)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


def at_once(beta, temperature):
    """The same by its definition, with all logits."""

    def total(student, teacher, targets):
        (hidden, head), (other, of_other) = student, teacher
        logits = hidden @ head
        q = jax.nn.softmax(logits / temperature)
        p = jax.nn.softmax(other @ of_other / temperature)
        mixture = beta * p + (1 - beta) * q
        if beta in (0, 1):
            near, far = (p, q) if beta == 0 else (q, p)
            divergence = jnp.sum(near * jnp.log(near / far), -1)
        else:
            of_p, of_q = (jnp.sum(x * jnp.log(x / mixture), -1) for x in (p, q))
            divergence = beta * of_p + (1 - beta) * of_q
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return jnp.sum(divergence - 0.5 * logp)

    return jax.jit(jax.value_and_grad(total))


@pytest.mark.parametrize(
    ("beta", "dims"),
    [
        (0.0, (1, 1, 1, 1, 1)),
        pytest.param(0.3, (1, 1, 1, 1, 1), marks=pytest.mark.nightly),
        (0.3, (2, 2, 1, 1, 2)),
        pytest.param(1.0, (1, 1, 1, 1, 1), marks=pytest.mark.nightly),
        pytest.param(0.0, (1, 2, 1, 2, 2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.daily("0.3-*")
def test_chunks_equal_all_tokens_at_once(beta, dims):
    student, teacher, targets = sides(4, 12)
    run = chunked(create_mesh(dims), beta=beta, temperature=1.7, chunk=5)
    total, (slopes, of_teacher) = run(student, teacher, targets)
    wanted, wanted_slopes = at_once(beta, 1.7)(student, teacher, targets)
    assert float(total) == pytest.approx(float(wanted), rel=1e-5)
    for left, right in zip(slopes, wanted_slopes, strict=True):
        assert np.max(np.abs(left - right)) <= 1e-5 * np.max(np.abs(right))
    for slope in of_teacher:
        assert not np.any(slope), "nothing is learned by the teacher"


@pytest.mark.nightly
def test_memory_does_not_grow_with_tokens_times_vocabulary():
    vocab, chunk = 2048, 16
    run = chunked(create_mesh((1, 1, 1, 1, 1)), beta=0.3, temperature=2.0, chunk=chunk)

    def needs(tokens):
        compiled = run.lower(*sides(1, tokens, vocab)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = needs(64), needs(512)
    assert few > 4 * chunk * vocab, "a chunk's logits, or nothing is measured"
    assert (many - few) / (512 - 64) < 4 * vocab / 16, "far less than a row of logits each"


@pytest.fixture
def tables(monkeypatch):
    """The models whose embeddings received noise; toys have a separate table."""
    seen, noisy = [], scoring.noisy_embeddings

    def table(model):
        return lambda ids: model.embed_tokens[...].astype(jnp.float32)[ids]

    def watched(model, *given, **more):
        seen.append(model)
        return noisy(model, *given, **more)

    monkeypatch.setattr(neftune, "token_table", table)
    monkeypatch.setattr(scoring, "noisy_embeddings", watched)
    return seen


def rows_of(trainer):
    """Return the arrays that the loss of a method reads."""
    random = np.random.default_rng(0)
    if hasattr(trainer, "get_rows"):
        batch, weights = trainer.feed.dataset.batch_at(0), trainer.weights()
        return trainer.generate(batch, weights, 0).rows
    return next_token_batch(packed([documents(random, 2, good=[True, True]) for _ in range(8)]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [pytest.param("distillation", marks=pytest.mark.nightly), "seq_kd", "gkd"]
)
def test_noise_on_embeddings_is_the_students_alone(toy, tables, method):
    def made(**given):
        frozen = {"teacher": toy.model(seed=5)}
        if method == "gkd":
            options = {"rewards": (), "lmbda": 1.0, "frozen": frozen, **given}
            return online("gkd", toy.model(), "unused", **options)
        arguments = arguments_class(method)(total_batch_size=8, **given)
        return trainer_class(method)(arguments, toy.model(), frozen=frozen)

    plain, noisy = made(), made(neftune_noise_alpha=5.0)
    rows = rows_of(plain)
    models = Models(toy.model(), plain.method.frozen.merge(plain.method.frozen.leaves))

    def loss(trainer, key):
        return float(trainer.loss(models, rows, key).sums["main_loss"].value)

    key = jax.random.key(1)
    quiet = loss(plain, None)
    assert loss(noisy, None) == quiet == loss(plain, key), "an evaluation has no noise"
    assert not tables
    assert loss(noisy, key) != pytest.approx(quiet, rel=1e-4)
    assert tables == [models.learner], "and the teacher none at all"


@pytest.mark.nightly
def test_gkd_has_full_logits_nowhere(toy):
    """No array of all tokens times the vocabulary, forwards and backwards."""
    teacher = toy.model(seed=5)
    run = online(
        "gkd",
        toy.model(),
        "unused",
        rewards=(),
        lmbda=1.0,
        lmhead_chunksize=7,
        frozen={"teacher": teacher},
    )
    rows = rows_of(run)
    graphdef, params, other = run.model.split_module()

    def objective(params):
        models = Models(nnx.merge(graphdef, params, other), {"teacher": teacher})
        return run.loss(models, rows, None).sums["main_loss"].sum

    text = str(jax.make_jaxpr(jax.grad(objective))(params))
    assert f"f32[7,{toy.vocab}]" in text, "a chunk's logits, or nothing is tested"
    for full in (f"[56,{toy.vocab}]", f"[8,7,{toy.vocab}]"):
        assert full not in text
