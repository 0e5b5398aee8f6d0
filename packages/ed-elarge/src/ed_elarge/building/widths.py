"""µP of a run: the initial scales of its model, and the learning rates of its trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from ed_infra.rules import Rules

from ed_elarge.config.run_config import RunConfig

if TYPE_CHECKING:
    from ed_models.base.module import EasyDeLBaseModule
    from ed_models.tasks.widths import WidthFactors
    from ed_trainers.options.base import TrainingArguments

    from ed_elarge.model import eLargeModel

_ModelT = TypeVar("_ModelT", bound="EasyDeLBaseModule")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def scale_model(elm: eLargeModel, model: _ModelT) -> _ModelT:
    """Scale the initial values of a new model."""
    from ed_models.tasks.widths import scale_parameters

    return scale_parameters(model, _compute_factors(elm.config, model))


def scale_arguments(elm: eLargeModel) -> TrainingArguments:
    """Return the arguments of the trainer, with the learning rates of the parametrization.

    The rules of the run file remain: their learning rates are multiplied. The product of learning
    rate and weight decay is that of the base model, so decay is the same share of a weight.
    """
    arguments = elm.config.trainer
    assert arguments is not None, "`eLargeModel.part` checks the section"
    factors = _compute_factors(elm.config, elm.part("model"))
    from ed_trainers.optimizers.groups import NO_DECAY

    rates = Rules(arguments.learning_rate_rules, kind="learning rate rule")
    decays = Rules(arguments.weight_decay_rules, kind="weight decay rule")
    scaled_rates: dict[str, float] = {}
    scaled_decays: dict[str, float] = {}
    trained = Rules(arguments.trained_parameters or (("", True),), kind="trainable rule")
    for name, one in factors.items():
        is_trained = trained.match(name)
        if is_trained is None or not is_trained[1]:
            continue
        rule, decay_rule = rates.match(name), decays.match(name)
        scaled_rates[name] = one.rate * (1.0 if rule is None else rule[1])
        default = 0.0 if NO_DECAY.search(name) else arguments.weight_decay
        scaled_decays[name] = (default if decay_rule is None else decay_rule[1]) / one.rate
    rates.check_used()
    decays.check_used()
    return arguments.model_copy(
        update={
            "learning_rate_rules": tuple(_write_rules(scaled_rates)),
            "weight_decay_rules": tuple(_write_rules(scaled_decays)),
        }
    )


def _compute_factors(run: RunConfig, model: EasyDeLBaseModule) -> Mapping[str, WidthFactors]:
    """Return the factors of each parameter."""
    section = run.model
    assert section is not None, "`eLargeModel.part` checks the section"
    from ed_models.tasks.widths import compute_width_factors

    with run.blame("model", "base_widths"):
        return compute_width_factors(model, section.base_widths)


def _write_rules(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield a rule for each name; parameters that differ only in the layer share a rule."""
    by_pattern: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        by_pattern.setdefault(_NUMBER.sub("#", name), {})[name] = value
    for pattern, members in by_pattern.items():
        if len(set(members.values())) == 1:
            parts = (re.escape(part) for part in pattern.split("#"))
            yield f"^{r'[0-9]+'.join(parts)}$", next(iter(members.values()))
        else:
            yield from ((f"^{re.escape(name)}$", value) for name, value in members.items())
