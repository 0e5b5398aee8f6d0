"""What tests of online methods share: prompts by step, and a rollout of the toy model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_trainers import trainer_class
from ed_trainers.arguments import arguments_class
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.rollout import Sampled
from ed_trainers.step import build_train_step
from flax import nnx

PROMPT, NEW, END = 3, 4, 2
OPTIONS = {
    "max_prompt_length": PROMPT,
    "max_completion_length": NEW,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "weight_decay": 0.0,
    "log_steps": 1,
    "use_tensorboard": False,
    "progress_bar_type": "none",
}


class Batch(NamedTuple):
    input_ids: list[list[int]]
    fields: dict[str, list]


class Written(NamedTuple):
    """A batch of prompts that are texts; each word of a text is a token."""

    input_ids: list[list[int]]
    fields: dict[str, list]

    @property
    def prompts(self):
        return [Words().decode(ids, True) for ids in self.input_ids]

    def with_prompt(self, number, prompt):
        return Words()(prompt)["input_ids"]


class Words:
    """A tokenizer of numbers; other words have tokens too."""

    eos_token_id = END

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(w) if w.isdigit() else 3 + len(w) % 29 for w in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class Prompts:
    """Prompts of one to three tokens, a pure function of the step."""

    def __init__(self, count, generations=4, seed=0, batch=Batch, demonstrates=False):
        self.demonstrates = demonstrates
        self.count, self.seed, self.steps_per_epoch, self.batch = count, seed, generations, batch
        self.fingerprint = f"prompts-{count}-{seed}"
        self.asked = []

    def batch_at(self, step):
        self.asked.append(step)
        random = np.random.default_rng((self.seed, step))
        ids = [random.integers(3, 32, random.integers(1, 4)).tolist() for _ in range(self.count)]
        fields = {"wanted": [(own[-1] * 5 + 3) % 32 for own in ids]}
        if self.demonstrates:
            fields["privileged_context"] = [f"{sum(own) % 29 + 3}" for own in ids]
        return self.batch(ids, fields)


class ToyRollout:
    """Samples from the toy model, one seed a completion; see `Sampled.logprobs`."""

    def __init__(self):
        self.versions = []
        self._next = None

    def generate(self, prompts, params, weights, *, seeds=None):
        self.versions.append(weights.version)
        assert params["max_tokens"] == NEW
        if self._next is None:
            graphdef = weights.graphdef

            @jax.jit
            def following(state, ids, segments, last):
                model = nnx.merge(graphdef, state)
                places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
                out = model(ids, segment_ids=segments, position_ids=places, logits_at="none")
                hidden = out.last_hidden_state[jnp.arange(len(ids)), last]
                return jax.nn.log_softmax(model.head()(hidden))

            self._next = following
        ids = np.zeros((len(prompts), PROMPT + NEW), np.int32)
        lengths = np.array([len(p) for p in prompts])
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        randoms = [np.random.default_rng(seed) for seed in seeds]
        tokens, logps = [[] for _ in prompts], [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        for _ in range(NEW):
            here = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int32)
            scores = np.asarray(self._next(weights.state, ids, here, lengths - 1), np.float64)
            for row in sorted(open_rows):
                probs = filtered(scores[row] / params["temperature"], params)
                token = int(randoms[row].choice(len(probs), p=probs))
                tokens[row].append(token)
                logps[row].append(float(np.log(probs[token])))
                ids[row, lengths[row]] = token
                lengths[row] += 1
                if token == END:
                    open_rows.discard(row)
        return [
            Sampled(own, logp, weights.version, own[-1] == END)
            for own, logp in zip(tokens, logps, strict=True)
        ]


def filtered(scores, params):
    """Return the probabilities of float64 scores [v] after `top_k`, `top_p` and `min_p`."""
    order = np.argsort(-scores, kind="stable")[: params["top_k"] or None]
    odds = np.exp(scores[order] - scores[order[0]])
    before = np.cumsum(odds) - odds
    kept = (before < params["top_p"] * odds.sum()) & (odds >= params["min_p"])
    probs = np.zeros_like(scores)
    probs[order[kept]] = odds[kept] / odds[kept].sum()
    return probs


def phase_of(run):
    """The object of a trainer that samples."""
    return run.method.phase


def even(completion_ids):
    """The share of even tokens."""
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def words(completions, bonus=0.0):
    """The number of words, and a bonus."""
    return [len(text.split()) + bonus for text in completions]


def online(method, model, directory, *, rows=8, generations=4, rewards=(even,), **given):
    """A trainer of an online method on prompts, with the toy's rollout."""
    frozen, callbacks = given.pop("frozen", {}), given.pop("callbacks", ())
    held_out = given.pop("eval_dataset", None)
    more = {"total_batch_size": rows, "save_directory": str(directory)}
    scored = {"reward_functions": rewards} if rewards else {}
    # Prompts of `sdpo` and `sdft` are texts, because the methods write longer ones.
    written = {"batch": Written} if method in ("sdpo", "sdft") else {}
    written |= {"demonstrates": True} if method == "sdft" else {}
    arguments = arguments_class(method)(**{**OPTIONS, **more, **given})
    trainer = trainer_class(method)(
        arguments,
        model,
        Prompts(arguments.loader_batch_size, generations, **written),
        held_out,
        rollout=ToyRollout(),
        frozen=frozen,
        callbacks=callbacks,
        **scored,
    )
    trainer.method.tokenizer = Words() if written else None
    return trainer


def one_step(method, model, accumulation=1, **given):
    """Parameters that moved in a step on the first generation, and its report."""
    run = online(method, model, "unused", gradient_accumulation_steps=accumulation, **given)
    generation = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0)
    arguments = run.arguments
    schedule = build_schedule(arguments, 10)
    tx = build_optimizer(arguments, schedule)
    state = run._first_state().init_tx(tx)
    before = jax.tree.map(np.array, state.graphstate)
    rows = arguments.sequences_per_step // accumulation
    step = build_train_step(state, run.method, schedule, rows=rows, seed=0)
    placed = run.placement.place(
        microbatches(run.prepare(generation.rows), accumulation), stacked=True
    )
    leaves, report = step(tuple(jax.tree.leaves(state)), placed)
    after = jax.tree.unflatten(jax.tree.structure(state), leaves).graphstate
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, after, before)
    report = {name: float(value) for name, value in jax.device_get(report).items()}
    return moved, report | {"figures": generation.figures["completions/mean_length"]}
