"""Methods of an engine that replace, lend or free its weights and memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_esurge.config import EngineConfig
from ed_esurge.core.commands import (
    Command,
    DropWeights,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from ed_esurge.engine.assembly import Loop


class ServesWeights:
    """Weight methods of an engine. They must be called in the thread of the engine."""

    config: EngineConfig
    loop: Loop

    @abstractmethod
    def execute(self, command: Command) -> None:
        """Execute a command before the next step."""

    def update_model_weights(self, model_or_state: LanguageModel | nnx.State) -> None:
        """Replace the served weights by a copy of other weights before the next step.

        Unfinished requests keep their tokens, and their keys and values are recomputed. The prefix
        cache is cleared. Nothing is compiled. The caller may change or donate its arrays
        afterwards.

        Args:
            model_or_state: a model of the same architecture, in any layout, or its state.

        Raises:
            ConfigError: the structure or a shape differs.
        """
        self.execute(UpdateWeights(model_or_state))

    @contextmanager
    def weights(self, model_or_state: LanguageModel | nnx.State) -> Iterator[Self]:
        """Serve the caller's arrays without a copy within a `with` block.

        At the end of the block the engine releases the arrays, so a train step may donate them.
        The engine then has no weights: `step` raises an error until `update_model_weights` or the
        next block. Arrays of another dtype, sharding or layout are converted, which copies them.

        Args:
            model_or_state: see `update_model_weights`.
        """
        self.execute(UpdateWeights(model_or_state, copy=False))
        try:
            yield self
        finally:
            self.execute(DropWeights())

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, including its pages in host memory.

        Unfinished requests keep their tokens, and their keys and values are recomputed.
        """
        self.execute(ResetPrefixCache())

    def pause(self) -> None:
        """Stop the steps. With `destroy_pages_on_pause` the memory of the pages is freed.
        Unfinished requests stay queued and are recomputed after `resume`."""
        self.execute(Pause(free_pages=self.config.destroy_pages_on_pause))

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, by `pause` or `sleep`."""
        return self.loop.paused

    def resume(self) -> None:
        """Resume after `pause`."""
        self.execute(Resume())

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of pages and weights until `wake_up`.

        Unfinished requests stay queued and are recomputed. Adapters stay in device memory.

        Args:
            level: 1 moves the weights to host memory (no effect on a CPU). 2 drops the weights, so
                that `update_model_weights` is required before `wake_up`.

        Raises:
            ConfigError: the level is not 1 or 2.
            EasyDeLError: the level is 1, and the weights are sharded over several processes.
        """
        self.execute(Sleep(keep_weights=check_level(level) == 1))

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: between `sleep` and `wake_up`."""
        return self.loop.asleep

    def wake_up(self) -> None:
        """Resume after `sleep`. Nothing is compiled.

        Raises:
            ConfigError: the engine has no weights.
        """
        self.execute(WakeUp())


def check_level(level: int) -> int:
    """Return a level of `sleep` after validation.

    Raises:
        ConfigError: the level is not 1 or 2.
    """
    if level not in (1, 2):
        raise ConfigError(f"sleep has the levels 1 (keeps the weights) and 2, not {level!r}")
    return level
