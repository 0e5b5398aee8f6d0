"""The batches of a method that samples: one generation, learned from for several steps.

A generation of prompts is completed and scored when its first step asks for it, with the weights
that this step begins with. Its rows are shared out to `steps_per_generation` optimizer steps, and
that `num_iterations` times. A checkpoint within a generation holds its rows, because the weights
that sampled them are gone; one between two generations needs none.

Legend: n rows of a generation.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.batches import Dataset, Feed, HostBatch
from ed_trainers.options.online import OnlineArguments
from ed_trainers.stored.npz import read_npz

_ROLLOUT = "rollout"


class Generation(NamedTuple):
    """What one generation is learned from.

    Attributes:
        number: of the generation, from 0.
        rows: arrays of the loss, each [n, ...].
        figures: for the log.
    """

    number: int
    rows: dict[str, np.ndarray]
    figures: dict[str, float]


Generate = Callable[[HostBatch, int], Generation]


class RolloutFeed(Feed):
    """Rows of generations, by step.

    Args:
        dataset: gives the prompts of each generation, as `Feed` takes them.
        arguments: say how many steps a generation lasts.
        generate: completes and scores the prompts of a generation, by its number.
    """

    def __init__(self, dataset: Dataset, arguments: OnlineArguments, generate: Generate):
        super().__init__(dataset)
        self._arguments, self._generate = arguments, generate
        self._now: Generation | None = None
        self._within = False  # the next step goes on with the present generation

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of one pass over the prompts, where the dataset knows."""
        generations = super().steps_per_epoch
        return None if generations is None else generations * self._arguments.updates_per_generation

    def batch(self, step: int) -> HostBatch:
        """Return the rows of update `step`; the first one of a generation samples.

        Raises:
            ConfigError: a generation has another number of rows than its steps take.
        """
        arguments = self._arguments
        number, within = divmod(step, arguments.updates_per_generation)
        if self._now is None or self._now.number != number:
            self._now = None  # memory of the one before, while the next one is made
            self._now = self._checked(self._generate(super().batch(number), number))
        self._within = within + 1 < arguments.updates_per_generation
        self.figures = self._now.figures
        size = arguments.total_batch_size
        begin = within % arguments.steps_per_generation * size
        return {name: array[begin : begin + size] for name, array in self._now.rows.items()}

    def _checked(self, generation: Generation) -> Generation:
        arguments = self._arguments
        wanted = arguments.total_batch_size * arguments.steps_per_generation
        rows = len(next(iter(generation.rows.values())))
        if rows != wanted:
            raise ConfigError(
                f"a generation gave {rows} rows, but total_batch_size "
                f"{arguments.total_batch_size} times steps_per_generation "
                f"{arguments.steps_per_generation} are {wanted}: let train_dataset give "
                f"{arguments.loader_batch_size} prompts at once"
            )
        if arguments.steps_per_generation == 1:
            return generation
        # The rows of a group lie side by side: each step is to see many groups.
        order = np.random.default_rng((arguments.seed, generation.number)).permutation(rows)
        return generation._replace(
            rows={name: array[order] for name, array in generation.rows.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the prompts and, within a generation, what was sampled."""
        state = super().state_dict()
        if self._within and self._now is not None:
            state[_ROLLOUT] = _as_json(self._now)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; see `Feed.load_state_dict`."""
        saved = state.get(_ROLLOUT)
        self._now = None if saved is None else _from_json(saved)
        super().load_state_dict({name: x for name, x in state.items() if name != _ROLLOUT})

    def difference(self, state: Mapping[str, Any]) -> str:
        """See `Feed.difference`."""
        return super().difference({name: x for name, x in state.items() if name != _ROLLOUT})


def _as_json(generation: Generation) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez_compressed(file, **generation.rows)  # type: ignore[arg-type]
    return {
        "number": generation.number,
        "rows": base64.b64encode(file.getvalue()).decode("ascii"),
        "figures": generation.figures,
    }


def _from_json(saved: Mapping[str, Any]) -> Generation:
    rows = io.BytesIO(base64.b64decode(saved["rows"]))
    arrays = read_npz(rows, "the generation of the checkpoint")
    return Generation(int(saved["number"]), arrays, dict(saved["figures"]))
