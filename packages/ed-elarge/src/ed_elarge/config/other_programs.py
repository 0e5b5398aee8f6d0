"""Keys of `trainer` that EasyDeL and TRL have, and that other sections or keys have here.

`normalize` moves these keys before validation, so that each has its documented effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ed_elarge.errors import Problem

#: Key of `trainer` -> the path in `mixture` with the same meaning.
OF_MIXTURE = {
    "packing": ("pack_tokens",),
    "assistant_only_loss": ("tokenization", "assistant_only_loss"),
}
#: Keys of `loss_config` -> the keys of `trainer`.
LOSSES = {"label_smoothing": "label_smoothing_factor", "z_loss": "z_loss_coefficient"}
#: All keys of `trainer` that this module moves.
KEYS = frozenset({*OF_MIXTURE, "dataset_text_field", "loss_config", "use_wandb"})


def move_keys(sections: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Problem]]:
    """Return the sections without these keys, with the values in their places, and problems.

    The paths of problems start at the sections.
    """
    trainer = sections["trainer"]
    trainer_values, mixture = dict(trainer), sections.get("mixture")
    problems: list[Problem] = []
    _tracker(trainer_values, problems)
    _losses(trainer_values, problems)
    if isinstance(mixture, Mapping):
        for key, path in OF_MIXTURE.items():
            if key in trainer_values:
                value = trainer_values.pop(key)
                mixture = _with(mixture, path, value, ("trainer", key), problems)
        if "dataset_text_field" in trainer_values:
            name = trainer_values.pop("dataset_text_field")
            informs = mixture.get("informs")
            if isinstance(informs, list):
                filled = [
                    {**one, "content_field": name} if _lacks_field(one) else one for one in informs
                ]
                mixture = {**mixture, "informs": filled}
    out = {**sections, "trainer": trainer_values}
    return ({**out, "mixture": mixture} if mixture is not None else out), problems


def _lacks_field(inform: object) -> bool:
    named = ("content_field", "text_field")
    return isinstance(inform, Mapping) and not any(name in inform for name in named)


def _with(
    mixture: Mapping[str, Any],
    path: tuple[str, ...],
    value: object,
    key_path: tuple[str, str],
    problems: list[Problem],
) -> Mapping[str, Any]:
    """Return the mixture with a value, unless it has another one."""
    first, *inner_path = path
    inner = mixture.get(first)
    if inner_path and isinstance(inner, Mapping | None):
        return {**mixture, first: _with(inner or {}, tuple(inner_path), value, key_path, problems)}
    if first in mixture and inner != value:
        message = f"{value!r} differs from {first} ({inner!r}) of the mixture: keep one of them"
        problems.append(Problem(key_path, message))
        return mixture
    return {**mixture, first: value}


def _tracker(trainer: dict[str, Any], problems: list[Problem]) -> None:
    """Replace `use_wandb` by `report_to`."""
    if "use_wandb" not in trainer:
        return
    value = trainer.pop("use_wandb")
    if not isinstance(value, bool):
        problems.append(Problem(("trainer", "use_wandb"), f"must be true or false, got {value!r}"))
    elif value and "report_to" in trainer:
        message = "use_wandb and report_to name trackers: keep report_to"
        problems.append(Problem(("trainer", "use_wandb"), message, True))
    elif value:
        trainer["report_to"] = ["wandb"]


def _losses(trainer: dict[str, Any], problems: list[Problem]) -> None:
    """Replace the keys of `loss_config` by those of the trainer."""
    config = trainer.get("loss_config")
    if not isinstance(config, Mapping):
        return
    del trainer["loss_config"]
    for key, value in config.items():
        name = LOSSES.get(str(key))
        if name is None:
            message = f"unknown key {key!r} (known: {', '.join(LOSSES)})"
            problems.append(Problem(("trainer", "loss_config", key), message, True))
        elif name in trainer:
            message = f"{key} of loss_config and {name} are one option: keep {name}"
            problems.append(Problem(("trainer", "loss_config", key), message, True))
        else:
            trainer[name] = value
