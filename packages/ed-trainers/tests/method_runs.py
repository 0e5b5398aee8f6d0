"""What tests of methods share: packed pairs of a toy task, and one plain step of a trainer."""

from __future__ import annotations

import jax
import numpy as np
from ed_trainers import Callback, arguments_class, trainer_class
from ed_trainers.figures.metrics import CLOCKED, read_metrics
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.state import EasyDeLState
from ed_trainers.step import build_train_step

LENGTH, PROMPT = 24, 2


class StopAt(Callback):
    """Ends a run after a step, as a signal does."""

    def __init__(self, step):
        self.step = step

    def on_log(self, trainer, row):
        if row["step"] == self.step:
            trainer.stop("the test")


def rows_of(directory):
    """Return the rows of a run's record without times."""
    rows = read_metrics(directory / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows]


def documents(random, count, *, good):
    """Prompt and answer: a good answer counts on from the prompt's last token, by threes."""
    prompt = random.integers(1, 31, (count, PROMPT))
    lengths = random.integers(2, 5, count)
    steps = prompt[:, -1:] + 3 * np.arange(1, 5)
    noise = random.integers(1, 31, (count, 4))
    answers = np.where(np.asarray(good)[:, None], 1 + steps % 30, noise)
    return [(p.tolist(), a[:n].tolist()) for p, a, n in zip(prompt, answers, lengths, strict=True)]


def packed(rows, lead="", **values):
    """Rows, each a list of (prompt, answer), as a loader gives them; values: one list a row."""
    lead = f"{lead}_" if lead else ""
    batch = {
        f"{lead}{name}": np.full((len(rows), LENGTH), fill, np.int32)
        for name, fill in (("input_ids", 0), ("segment_ids", 0), ("position_ids", 0))
    }
    batch[f"{lead}labels"] = np.full((len(rows), LENGTH), -100, np.int32)
    batch |= {name: np.full((len(rows), LENGTH), -100.0, np.float32) for name in values}
    for row, inside in enumerate(rows):
        used = 0
        for number, (prompt, answer) in enumerate(inside):
            at = slice(used, used + len(prompt) + len(answer))
            used = at.stop
            batch[f"{lead}input_ids"][row, at] = prompt + answer
            batch[f"{lead}segment_ids"][row, at] = number + 1
            batch[f"{lead}position_ids"][row, at] = np.arange(len(prompt) + len(answer))
            batch[f"{lead}labels"][row, at] = [-100] * len(prompt) + answer
            for name, of in values.items():
                batch[name][row, at] = of[row][number]
    return batch


class Pairs:
    """Pairs, packed; rows hold different numbers of them."""

    steps_per_epoch = 12

    def __init__(self, rows=8, seed=0, per_row=3):
        self.rows, self.seed, self.per_row = rows, seed, per_row
        self.fingerprint = f"pairs-{rows}-{seed}-{per_row}"

    def batch_at(self, step):
        random = np.random.default_rng((self.seed, step))
        chosen, rejected = [], []
        for row in range(self.rows):
            count = 1 + row % self.per_row
            good = documents(random, count, good=[True] * count)
            bad = documents(random, count, good=[False] * count)
            chosen.append(good)
            rejected.append([(p, a) for (p, _), (_, a) in zip(good, bad, strict=True)])
        return {**packed(chosen, "chosen"), **packed(rejected, "rejected")}


def apart(batch, leads=("chosen", "rejected")):
    """The same documents, one a row."""
    leads = [f"{lead}_" if lead else "" for lead in leads]
    counts = batch[f"{leads[0]}segment_ids"].max(axis=1)
    out = {name: [] for name in batch}
    for row, count in enumerate(counts):
        for segment in range(1, count + 1):
            for name, array in batch.items():
                lead = next((lead for lead in leads if name.startswith(lead)), leads[0])
                here = batch[f"{lead}segment_ids"][row] == segment
                values = np.full_like(array[row], -100 if name.endswith("labels") else 0)
                values[: here.sum()] = array[row][here] if not name.endswith("ment_ids") else 1
                out[name].append(values)
    return {name: np.stack(rows) for name, rows in out.items()}


def one_step(method, model, batch, accumulation=1, frozen=None, tokenizer=None, **given):
    """Parameters by name after a step of plain gradient descent, and its report."""
    rows = next(iter(batch.values())).shape[0]
    arguments = arguments_class(method)(
        total_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **{"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, **given},
    )
    trainer = trainer_class(method)(
        arguments, model, processing_class=tokenizer, frozen=frozen or {}
    )
    schedule = build_schedule(arguments, 10)
    state = EasyDeLState.create(
        model=model, tx=build_optimizer(arguments, schedule), init_opt_state=True
    )
    before = jax.tree.map(np.array, state.graphstate)
    parts = microbatches(trainer.prepare(batch), accumulation)
    step = build_train_step(state, trainer.method, schedule, rows=rows // accumulation, seed=0)
    placed = trainer.placement.place(parts, stacked=True)
    leaves, report = step(tuple(jax.tree.leaves(state)), placed)
    after = jax.tree.unflatten(jax.tree.structure(state), leaves).graphstate
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, after, before)
    return moved, {name: float(value) for name, value in jax.device_get(report).items()}


def near(left, right, tolerance=1e-5):
    """Trees agree relative to the largest entry of all."""
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(right))
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.max(np.abs(a - b)) <= tolerance * largest


def near_reports(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert abs(left[name] - value) <= tolerance * max(1.0, abs(value)), name
