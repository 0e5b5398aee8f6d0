"""Nothing compiles after the first step of each shape."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from ed_trainers import Callback, arguments_class, trainer_class
from method_runs import Pairs
from online_runs import online

STEPS = 6


@contextmanager
def compiled():
    """The compilations within the block, one entry each."""
    events = []

    def listen(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Counts(Callback):
    """How many compilations there were when each row was written."""

    def __init__(self, events):
        self.events, self.at = events, {}

    def on_log(self, trainer, row):
        if "loss" in row:
            self.at[row["step"]] = len(self.events)


def run(method, toy, directory, callback):
    if method == "grpo":
        more = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2}
        options = {"max_training_steps": STEPS, "do_last_save": False, **more}
        return online("grpo", toy.model(), directory, callbacks=[callback], **options)
    arguments = arguments_class(method)(
        save_directory=str(directory),
        total_batch_size=8,
        gradient_accumulation_steps=2,
        max_training_steps=STEPS,
        log_steps=1,
        save_steps=2,
        do_last_save=False,
        use_tensorboard=False,
        progress_bar_type="none",
        **({"sync_ref_model": True, "ref_model_sync_steps": 2} if method == "dpo" else {}),
    )
    data = Pairs() if method == "dpo" else toy.loader()
    return trainer_class(method)(arguments, toy.model(), data, callbacks=[callback])


@pytest.mark.parametrize(
    "method", ["sft", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("dpo", "grpo"))]
)
def test_nothing_compiles_after_the_first_step(toy, tmp_path, method):
    with compiled() as events:
        counts = Counts(events)
        run(method, toy, tmp_path, counts).train()
        last = len(events)
        jax.jit(lambda x: x * 3 + last)(jnp.ones(3))
    assert len(events) > last, "it would have been noticed"
    assert list(counts.at) == list(range(1, STEPS + 1))
    # The row of a step is written while the next one runs.
    assert counts.at[1] > 0
    assert counts.at[STEPS] == counts.at[1], "a later step compiled"
