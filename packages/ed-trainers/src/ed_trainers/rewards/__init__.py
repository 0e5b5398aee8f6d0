"""Rewards of completions: named Python functions, and the rules of this package.

A reward function is called with the keywords `prompts`, `completions`, `completion_ids` and the
fields of the data rows; each is a list with one entry per completion. A function receives the
keywords that its signature names, or all keywords if it has `**kwargs`. It returns one number per
completion, or None if it does not apply to the completion. A function with the keyword `completion`
instead of `completions` is called for each completion, with the values of its row.

Legend: n completions, k reward functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ed_infra.errors import ConfigError, EasyDeLError, unknown_name

from ed_trainers import user_code
from ed_trainers.options.online import RewardName
from ed_trainers.rewards.rules import RULES

if TYPE_CHECKING:
    import numpy as np

RewardFunction = Callable[..., Sequence[float | None]]

#: Entry points of packages that add reward functions.
_GROUP = "easydel.rewards"
# Keywords of every function.
_ASKED = ("prompts", "completions", "completion_ids")
# Keyword of a function of one completion -> keyword of a function of all completions.
_OF_ONE = {"completion": "completions", "prompt": "prompts"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Maximum number of rows, and of characters of a prompt, in a message.
_SHOWN, _LONGEST = 5, 60


class RewardError(EasyDeLError):
    """A reward function failed, or did not return one number per completion."""


class Completed(Protocol):
    """The arguments of reward functions; `ed_trainers.online.completions` implements them."""

    @property
    def prompts(self) -> Sequence[Any]:
        """The prompts as texts or conversations."""
        ...

    @property
    def completions(self) -> Sequence[Any]:
        """The completions, in the form of their prompts."""
        ...

    @property
    def completion_ids(self) -> Sequence[Sequence[int]]:
        """Token ids of the completions."""
        ...

    @property
    def fields(self) -> Mapping[str, Sequence[Any]]:
        """Fields of the data rows, by name."""
        ...

    def __len__(self) -> int: ...


def reward_function(
    entry: RewardName | RewardFunction, folders: Sequence[str | Path] = ()
) -> tuple[str, RewardFunction]:
    """Return the name and the function of an entry of `reward_functions`.

    Args:
        entry: a name, a name with settings, or a function.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: the function does not exist, or a setting is unknown, invalid or missing.
    """
    if not isinstance(entry, str | dict):
        inner = entry.func if isinstance(entry, functools.partial) else entry
        return str(getattr(inner, "__name__", type(inner).__name__)), score_each(entry)
    name, settings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    function = score_each(_by_name(name, folders))
    for _, message in wrong_settings(name, function, settings):
        raise ConfigError(message)
    short = name.rsplit(":", 1)[-1]
    return short, functools.partial(function, **settings) if settings else function


def score_each(function: RewardFunction) -> RewardFunction:
    """Return a function of all completions; a function of one completion is called for each."""
    signature = inspect.signature(function)
    if "completion" not in signature.parameters or "completions" in signature.parameters:
        return function
    parameters = [
        p.replace(name=_OF_ONE.get(p.name, p.name)) for p in signature.parameters.values()
    ]
    single = {plural: name for name, plural in _OF_ONE.items()}

    @functools.wraps(function)
    def score(**columns: Sequence[object]) -> list[float | None]:
        names = [single.get(name, name) for name in columns]
        call = cast("Callable[..., float | None]", function)
        return [
            call(**dict(zip(names, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]

    vars(score)["__signature__"] = signature.replace(parameters=parameters)
    return score


def list_fields(
    entry: RewardName | RewardFunction, folders: Sequence[str | Path] = ()
) -> tuple[str, ...]:
    """Return the fields of the rows without which a function of `reward_functions` stops.

    Args:
        entry: a name, a name with settings, or a function.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: the function does not exist.
    """
    if isinstance(entry, str | dict):
        name, settings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if name in RULES:
            field = inspect.signature(RULES[name]).parameters.get("field")
            return () if field is None else (str((settings or {}).get("field", field.default)),)
    parameters = inspect.signature(reward_function(entry, folders)[1]).parameters.values()
    return tuple(
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in _NAMED and p.name not in _ASKED
    )


def _by_name(name: str, folders: Sequence[str | Path]) -> RewardFunction:
    if name in RULES:
        return RULES[name]
    if ":" in name:
        return user_code.load_function(name, folders)
    check_name(name)
    return _list_entry_points()[name].load()


def check_name(name: str) -> None:
    """Return the rule or the entry point with a name that contains no module.

    Raises:
        ConfigError: neither exists.
    """
    known_names = [*RULES, *_list_entry_points()]
    if name not in known_names:
        raise unknown_name("reward function", name, known_names)


def wrong_settings(
    name: str, function: RewardFunction, settings: Mapping[str, Any]
) -> Iterator[tuple[str | None, str]]:
    """Yield each setting that a function does not accept, and the reason; None for a missing
    setting.

    Values are only compared with the types of this package's rules.
    """
    yield from user_code.find_wrong_settings(
        "reward function",
        name,
        function,
        settings,
        other_parameters=_ASKED,
        has_types=name in RULES,
    )


def _list_entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


class Rewards:
    """Several reward functions.

    Args:
        entries: names or functions.
        folders: where files and modules are searched, before the working directory.

    Raises:
        ConfigError: a named function does not exist.
    """

    def __init__(
        self,
        entries: Sequence[RewardName | RewardFunction],
        folders: Sequence[str | Path] = (),
    ):
        self._functions = [reward_function(entry, folders) for entry in entries]
        names = [name for name, _ in self._functions]
        #: Names of the functions; a repeated name has a number at the end.
        self.names: tuple[str, ...] = tuple(
            name if names.count(name) == 1 else f"{name}_{names[:i].count(name) + 1}"
            for i, name in enumerate(names)
        )

    def __call__(self, completions: Completed) -> np.ndarray:
        """Return the reward of each function for each completion, float32 [n, k]; NaN for None.

        Raises:
            RewardError: a function raised an error, or returned an invalid value.
            ConfigError: a function requires a field that the data rows lack.
        """
        import numpy as np  # not needed to check a run file

        available_arguments = {
            **completions.fields,
            **{name: getattr(completions, name) for name in _ASKED},
        }
        out = np.empty((len(completions), len(self.names)), np.float32)
        for column, (name, (_, function)) in enumerate(
            zip(self.names, self._functions, strict=True)
        ):
            arguments = _arguments(name, function, available_arguments)
            try:
                values = list(function(**arguments))
            except Exception as error:
                raise RewardError(
                    f"reward function {name!r} raised {type(error).__name__}: {error}; it was "
                    f"called with {len(completions)} completions, "
                    f"{_rows(completions, range(len(completions)))}"
                ) from error
            out[:, column] = _numbers(name, values, completions)
        return out


def _arguments(
    name: str, function: RewardFunction, available_arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the keywords that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keyword_arguments = dict(available_arguments)
    else:
        keyword_arguments = {
            p.name: available_arguments[p.name] for p in parameters if p.name in available_arguments
        }
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if required and p.name not in keyword_arguments:
            raise ConfigError(
                f"reward function {name!r} requires {p.name!r}, which the data rows lack "
                f"(they have {', '.join(available_arguments)}): add it to additional_fields of the "
                "inform"
            )
    return keyword_arguments


def _numbers(name: str, values: list[Any], completions: Completed) -> list[float]:
    if len(values) != len(completions):
        raise RewardError(
            f"reward function {name!r} gave {len(values)} values for {len(completions)} "
            "completions: it must return one for each, None where it does not apply"
        )
    out, wrong = [], []
    for row, value in enumerate(values):
        number = math.nan
        if value is not None:
            try:
                number = float(value)
            except (TypeError, ValueError):
                wrong.append(row)
                continue
            if not math.isfinite(number):
                wrong.append(row)
        out.append(number)
    if wrong:
        raise RewardError(
            f"reward function {name!r} gave {values[wrong[0]]!r} for "
            f"{_rows(completions, wrong)}: a reward is a finite number, or None where the function "
            "does not apply"
        )
    return out


def _rows(completions: Completed, rows: Sequence[int]) -> str:
    """Format some rows with their prompts."""
    row_texts = []
    for row in rows[:_SHOWN]:
        prompt = repr(completions.prompts[row])
        row_texts.append(f"{row} ({prompt[:_LONGEST]}{'…' if len(prompt) > _LONGEST else ''})")
    more = len(rows) - len(row_texts)
    return f"row {', '.join(row_texts)}" + (f" and {more} more" if more else "")
