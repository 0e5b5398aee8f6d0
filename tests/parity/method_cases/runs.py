"""Whole runs with AdamW and fixed completions, compared with TRL's trainers.

Both sides start with the same weights and train on the same texts, pairs or completions, which
change from step to step. Each generation of `grpo` and `rloo` has two steps, so the ratios of the
second step are those of a changed policy. The results are the largest difference of the losses of a
step, relative to the largest loss of the run, and the largest difference of a parameter after the
last step, relative to the largest movement of its array.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.parity.method_cases import groups, harness, preference, supervised

#: Optimizer steps of a run, and its learning rate.
STEPS, RATE = 8, 1e-3
#: Steps on the completions of one generation.
ITERATIONS = 2
#: Tokens of the largest completion, and of the largest prompt.
LONGEST, PROMPT = 8, 16
# torch's and optax's default divides gradients near 0 by numbers near 0, so that rounding decides
# about whole steps.
_EPS = 1e-5


class Trace(NamedTuple):
    """Losses of the steps, and the parameters after them by Hugging Face's names."""

    losses: list[float]
    parameters: dict[str, np.ndarray]


def compare(ours: Trace, theirs: Trace) -> dict[str, float]:
    """Return the largest differences of losses and of parameters."""
    start = harness.hf_model(harness.folder(0)).state_dict()
    assert len(ours.losses) == len(theirs.losses) == STEPS
    largest = max(map(abs, theirs.losses))
    losses = [abs(a - b) / largest for a, b in zip(ours.losses, theirs.losses, strict=True)]
    parameters = []
    for name, value in theirs.parameters.items():
        movement = np.abs(value - start[name].numpy()).max()
        parameters.append(float(np.abs(ours.parameters[name] - value).max() / movement))
    return {"loss": max(losses), "parameters": max(parameters)}


# This project's side.


def train(trainer: Any, read: Callable[[Any, int], Any], rows: int) -> Trace:
    """Train with the compiled step of a trainer.

    Args:
        trainer: a trainer without data.
        read: returns the batch of a step from the present weights and the number of the step.
        rows: rows of a batch.
    """
    from ed_trainers.optimizers import build_optimizer, build_schedule
    from ed_trainers.placement import microbatches
    from ed_trainers.rollout import Weights
    from ed_trainers.step import build_train_step
    from safetensors.numpy import load_file

    arguments = trainer.arguments.replace(
        learning_rate=RATE, weight_decay=0.0, clip_grad=None, optimizer_kwargs={"eps": _EPS}
    )
    schedule = build_schedule(arguments, STEPS)
    state = trainer._first_state().init_tx(build_optimizer(arguments, schedule))
    treedef = jax.tree.structure(state)
    step = build_train_step(state, trainer.method, schedule, rows=rows, seed=0)
    leaves, losses = tuple(jax.tree.leaves(state)), []
    for number in range(STEPS):
        present = jax.tree.unflatten(treedef, leaves)
        weights = Weights(present.graphdef, present.graphstate, present.graphother, version=number)
        batch = trainer.prepare(read(weights, number))
        placed = trainer.placement.place(microbatches(batch, 1), stacked=True)
        leaves, report = step(leaves, placed)
        trainer.method.observe(report)
        losses.append(float(report["loss"]))
    with tempfile.TemporaryDirectory() as directory:
        jax.tree.unflatten(treedef, leaves).model.save_pretrained(directory)
        return Trace(losses, load_file(f"{directory}/model.safetensors"))


# TRL's side.


def train_there(model: Any, compute_losses: Iterator[Any]) -> Trace:
    """Train with AdamW of torch; each loss is computed with the present weights."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=_EPS)
    losses = []
    for loss in compute_losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trace(losses, {n: p.detach().numpy().copy() for n, p in model.named_parameters()})


def dpo(loss_type: str | tuple[str, ...], **options: Any) -> dict[str, float]:
    """Compare a run of `dpo` with `trl.DPOTrainer`."""
    path, base = harness.folder(0), harness.folder(1)
    ours = harness.trainer_of(
        "dpo",
        harness.our_model(path),
        {"reference": harness.our_model(base)},
        loss_type=loss_type,
        **options,
    )
    mine = train(ours, lambda _, number: harness.packed_pairs(seed=number), rows=2)
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = preference.build_dpo(directory, loss_type, options)

        def compute_losses() -> Iterator[Any]:
            for number in range(STEPS):
                chosen, rejected = zip(*harness.pairs(seed=number), strict=True)
                tensors = harness.answer_tensors([*chosen, *rejected])
                yield trainer.compute_loss(model.train(), tensors)

        return compare(mine, train_there(model, compute_losses()))


def tpo(**options: Any) -> dict[str, float]:
    """Compare a run of `tpo` with `trl.experimental.tpo.TPOTrainer`."""
    ours = harness.trainer_of("tpo", harness.our_model(harness.folder(0)), **options)
    mine = train(ours, lambda _, number: preference.triples(options, number)[1], rows=2)
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = preference.build_tpo(directory, options)

        def compute_losses() -> Iterator[Any]:
            for number in range(STEPS):
                tensors = harness.answer_tensors(preference.triples(options, number)[0])
                yield trainer.compute_loss(model.train(), tensors)

        return compare(mine, train_there(model, compute_losses()))


def dft() -> dict[str, float]:
    """Compare a run of `sft` with the loss of dynamic fine-tuning with `trl.SFTTrainer`."""

    def documents(number: int) -> list[harness.Answer]:
        return [chosen for chosen, _ in harness.pairs(seed=number)]

    ours = harness.trainer_of("sft", harness.our_model(harness.folder(0)), loss_type="dft")
    mine = train(ours, lambda _, number: harness.packed(documents(number), 2), rows=2)
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = supervised.build_dft(directory)

        def compute_losses() -> Iterator[Any]:
            for number in range(STEPS):
                tensors = supervised.labelled_tensors(documents(number))
                yield trainer.compute_loss(model.train(), tensors)

        return compare(mine, train_there(model, compute_losses()))


def sample(number: int) -> Any:
    """Return the completions of a generation."""
    return groups.completions(seed=5 + number)


def run_groups(method: str, own: dict[str, Any], other: dict[str, Any], corrects: str = "") -> Any:
    """Compare a run of a method with groups with TRL's trainer of the method."""
    import trl
    from ed_trainers import arguments_class, trainer_class

    functions = groups.functions_of(other)
    arguments: Any = arguments_class(method)
    options = arguments(
        total_batch_size=groups.GROUP * groups.PROMPTS,
        num_iterations=ITERATIONS,
        max_prompt_length=PROMPT,
        max_completion_length=LONGEST,
        num_return_sequences=groups.GROUP,
        **own,
    )
    path, base = harness.folder(0), harness.folder(1)
    frozen = {"reference": harness.our_model(base)} if options.has_reference else {}
    build: Any = trainer_class(method)
    ours = build(options, harness.our_model(path), frozen=frozen, reward_functions=functions)
    rows: dict[str, Any] = {}

    def read(weights: Any, number: int) -> Any:
        generation, within = divmod(number, ITERATIONS)
        if not within:
            rows.update(ours.method.phase.get_rows(sample(generation), weights, generation)[0])
        return dict(rows)

    mine = train(ours, read, rows=options.total_batch_size)
    kind = "RLOO" if method == "rloo" else "GRPO"
    classes = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = groups.build_trainer(
            directory, *classes, other, functions, groups.GROUP, corrects
        )
        trainer.current_gradient_accumulation_steps = 1

        def compute_losses() -> Iterator[Any]:
            inputs: Any = None
            for number in range(STEPS):
                generation, within = divmod(number, ITERATIONS)
                if not within:
                    inputs = groups.score_there(trainer, sample(generation))
                yield trainer._compute_loss(model, inputs)

        return compare(mine, train_there(model, compute_losses()))


def grpo(loss_type: str, corrects: str = "", **options: Any) -> dict[str, float]:
    """Compare a run of `grpo` with `trl.GRPOTrainer`."""
    return run_groups("grpo", *groups.get_options(loss_type, corrects, options), corrects)


def rloo(**options: Any) -> dict[str, float]:
    """Compare a run of `rloo` with `trl.RLOOTrainer`."""
    own = {"beta": 0.05, **options}
    return run_groups("rloo", own, own)


_RUNS: dict[Callable[..., Any], Callable[..., dict[str, float]]] = {
    supervised.dft: dft,
    preference.dpo: dpo,
    preference.tpo: tpo,
    groups.grpo: grpo,
    groups.rloo: rloo,
}


def list_runs() -> dict[str, Callable[[], dict[str, float]]]:
    """Return the comparisons of runs by the names of their cases."""
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    for name, case in {**supervised.CASES, **preference.CASES, **groups.CASES}.items():
        measure = case.measure if isinstance(case.measure, partial) else partial(case.measure)
        if measure.func in _RUNS:
            runs[name] = partial(_RUNS[measure.func], *measure.args, **measure.keywords)
    return runs


RUNS = list_runs()
