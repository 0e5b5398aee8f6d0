"""Warnings about values that are valid and probably mistakes. Paths start at the sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ed_elarge.config.checks.requirements import read_data_completions
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Problem

#: Actions that use the trained model of the run.
_AFTER_TRAINING = ("eval", "generate", "serve", "transcribe")


def list_advice(run: RunConfig) -> Iterator[Problem]:
    """Yield each warning."""
    yield from _unsaved_model(run)
    yield from _unpacked_rows(run)
    yield from _pages(run)
    yield from _nameless_functions(run)
    yield from read_data_completions(run)


def _nameless_functions(run: RunConfig) -> Iterator[Problem]:
    mixture = run.mixture
    for key in ("informs", "eval_informs") if mixture is not None else ():
        for number, inform in enumerate(getattr(mixture, key)):
            for name in ("format_callback", "preprocessing_fn"):
                function = getattr(inform, name)
                if callable(function) and not _has_address(function):
                    message = (
                        "the record of the run cannot name this function, so the run cannot be "
                        "repeated from it: define the function at the top of a file"
                    )
                    yield Problem(("mixture", key, number, name), message)


def _has_address(function: Callable[..., object]) -> bool:
    from ed_data.sources.python import find_address  # imports the readers of rows

    return find_address(function) is not None


def _unsaved_model(run: RunConfig) -> Iterator[Problem]:
    used = [action.name for action in run.actions if action.name in _AFTER_TRAINING]
    if run.trainer is not None and not run.trainer.do_last_save and run.will("train") and used:
        message = (
            f"the trained model is not saved: {', '.join(dict.fromkeys(used))} of this run can use "
            "the model in memory, and no later run can load it"
        )
        yield Problem(("trainer", "do_last_save"), message)


def _unpacked_rows(run: RunConfig) -> Iterator[Problem]:
    mixture = run.mixture
    if mixture is not None and mixture.pack_on_the_fly and not mixture.pack_tokens:
        message = (
            "pack_tokens is off, so rows are tokenized when a batch needs them, but not packed: "
            "set pack_tokens: true to pack them"
        )
        yield Problem(("mixture", "pack_on_the_fly"), message)


def _pages(run: RunConfig) -> Iterator[Problem]:
    size = run.esurge.page_size if run.esurge is not None else 1
    if size & (size - 1):
        next_power = 1 << size.bit_length()
        message = (
            f"{size} is not a power of two, so kernels of accelerators cannot read the pages: use "
            f"{next_power // 2} or {next_power}"
        )
        yield Problem(("esurge", "page_size"), message)
