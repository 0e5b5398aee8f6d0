"""Terminal output of a training run: messages, and a bar with the method's metrics and tokens/s."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

#: Seconds between two plain lines of a run that has no terminal.
LINE_SECONDS = 10.0
#: Seconds between two prints of completions with their rewards.
SAMPLE_SECONDS = 60.0
# Characters of a text in a line.
_LONGEST_TEXT = 100


class Progress:
    """A progress bar on standard output; plain lines if standard output is not a terminal.

    Plain lines are those of the first and the last step, and one about every ten seconds.

    Messages (`say`) always appear. Only the first process prints.

    Args:
        kind: "rich" (a bar, or a line for each metrics row), "json" (each row as JSON) or "none".
        total: steps of the whole run.
        done: steps before this process started.
        columns: names of the shown metrics; a missing metric of a row is omitted.
    """

    def __init__(self, kind: str, *, total: int, done: int = 0, columns: Sequence[str] = ("loss",)):
        self._kind, self._total, self._columns = kind, total, tuple(columns)
        self._bar: Bar | None = None
        self._samples_time = -math.inf
        self._mute = jax.process_index() != 0
        # The last plain line: its step, its time; and those of the first line.
        self._line: tuple[int, float] | None = None
        self._first_line = (done, time.monotonic())
        if self._mute or kind != "rich":
            return
        if not sys.stdout.isatty():
            self._kind = "plain"
            return

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            refresh_per_second=4,
        )
        self._figures = "compiling"
        self._train = self._bar.add_task(
            "train", total=total, completed=done, figures=self._figures
        )
        self._bar.start()

    def step(self, step: int, figures: Mapping[str, float] | None = None) -> None:
        """Move the bar to a step; show the columns and `tokens_per_second` of `figures`.

        Without a terminal, print a line if the last one is older than `LINE_SECONDS`.
        """
        if self._bar is None:
            if figures is not None and self._line is not None:
                self._print_line(step, figures)
            return
        if figures is not None:
            self._figures = self._format_metrics(figures)
        self._bar.update(self._train, completed=step, figures=self._figures)

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a metrics row, if rows were requested, or as a plain line if one is due."""
        if self._mute:
            return
        if self._kind == "json":
            _print(json.dumps(dict(row)))
        elif self._kind == "plain" and "loss" in row:
            self._print_line(int(row["step"]), row)

    def is_line_due(self) -> bool:
        """Return whether the next step prints a plain line, if its metrics are passed."""
        if self._kind != "plain" or self._mute or self._line is None:
            return False
        return time.monotonic() - self._line[1] >= LINE_SECONDS

    def _print_line(self, step: int, figures: Mapping[str, Any]) -> None:
        if self._line is not None and (
            step == self._line[0] or (step < self._total and not self.is_line_due())
        ):
            return
        now = time.monotonic()
        (first, began), remaining = self._first_line, ""
        if self._line is None:
            self._first_line = (step, now)
        elif first < step < self._total:
            left = (now - began) / (step - first) * (self._total - step)
            remaining = f"  {format_duration(left)} left"
        self._line = (step, now)
        _print(f"step {step}/{self._total}  {self._format_metrics(figures)}{remaining}")

    def print_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the columns of an evaluation, whose metrics begin with `eval_`."""
        names = dict.fromkeys(("loss", *self._columns))
        named_values = [(name, metrics.get(f"eval_{name}")) for name in names]
        parts = [f"eval_{name} {value:.4f}" for name, value in named_values if value is not None]
        self.say(f"step {step}: {'  '.join(parts)}")

    def print_samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Print the completions with the highest and the lowest reward, about once a minute."""
        now = time.monotonic()
        is_due = step == self._total or now - self._samples_time >= SAMPLE_SECONDS
        rewarded = [one for one in samples if isinstance(one.get("reward"), float)]
        if not rewarded or not is_due or self._kind not in ("rich", "plain"):
            return
        self._samples_time = now
        rewarded.sort(key=lambda one: cast(float, one["reward"]), reverse=True)
        for one in rewarded[:1] + rewarded[1:][-1:]:
            texts = [_shorten_text(one[name]) for name in ("prompt", "completion")]
            self.say(f"step {step}: reward {one['reward']:.4g}: {' continues '.join(texts)}")

    def evaluating(self, done: int, total: int | None) -> None:
        """Show the progress of an evaluation."""
        if self._bar is not None:
            of = f"/{total}" if total else ""
            self._bar.update(self._train, figures=f"evaluating {done}{of}")

    def _format_metrics(self, figures: Mapping[str, float]) -> str:
        parts = [f"{name} {figures[name]:.4f}" for name in self._columns if name in figures]
        rate = figures.get("tokens_per_second")
        return "  ".join([*parts, *([f"{rate:,.0f} tokens/s"] if rate else [])])

    def say(self, message: str) -> None:
        """Print a message, above the bar if there is one."""
        if self._mute:
            return
        if self._bar is None:
            _print(message)
        else:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the bar, and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _shorten_text(content: object) -> str:
    """Return a text, or the text of the last message of a conversation, in quotation marks."""
    last = content[-1] if isinstance(content, list) and content else content
    text = str(last.get("content")) if isinstance(last, Mapping) else str(content)
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…")


def _print(text: str) -> None:
    # The reader of standard output may have exited; a message must not end a run.
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def format_duration(seconds: float) -> str:
    """Return a duration in its largest units: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    minutes = math.ceil(seconds / 60)
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
