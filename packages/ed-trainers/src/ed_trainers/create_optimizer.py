"""`create_optimizer`: the optimizer of the arguments for a loop of one's own."""

from __future__ import annotations

import optax
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel

from ed_trainers.optimizers import build_optimizer, build_schedule, check_rules
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import DECAYING
from ed_trainers.state import EasyDeLState, split_model


def create_optimizer(
    model: LanguageModel | EasyDeLState,
    arguments: TrainingArguments | None = None,
    *,
    total_steps: int | None = None,
) -> optax.GradientTransformation:
    """Make an optimizer for a model: its schedule, decay and rates by rules, masters, clipping.

        tx = create_optimizer(model, TrainingArguments(optimizer="muon", max_training_steps=100))
        state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
        state = state.apply_gradients(grads=grads)

    Args:
        model: a module, or the state of one; every rule of the arguments must match a parameter
            of it that learns.
        arguments: options; default: those of `TrainingArguments`.
        total_steps: updates of the whole run, for the schedule; default: `max_training_steps`.

    Raises:
        ConfigError: a rule matches no parameter; or the learning rate decays over a number of
            steps that is not said.
    """
    arguments = TrainingArguments() if arguments is None else arguments
    params = (
        model.graphstate
        if isinstance(model, EasyDeLState)
        else split_model(model, arguments.trainable_rules)[1]
    )
    check_rules(arguments, params)
    steps = arguments.max_training_steps if total_steps is None else total_steps
    if steps is None and arguments.scheduler in DECAYING:
        raise ConfigError(
            f"scheduler {arguments.scheduler!r} decays to the end of the run: give total_steps, or "
            "set max_training_steps"
        )
    return build_optimizer(arguments, build_schedule(arguments, steps or 1))
