"""The weights and the memory of an engine: replaced, lent, given back for a while."""

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
    """The methods of an engine in whose thread they are called."""

    config: EngineConfig
    loop: Loop

    @abstractmethod
    def execute(self, command: Command) -> None:
        """Do what a command says before the next step."""

    def update_model_weights(self, model_or_state: LanguageModel | nnx.State) -> None:
        """Serve other weights from the next step on; the engine keeps a copy.

        Requests in flight go on with their tokens, which are computed anew; cached prefixes are
        dropped. Nothing is compiled. The caller may change or donate its arrays afterwards.

        Args:
            model_or_state: a model of the same architecture, in any layout, or its state.

        Raises:
            ConfigError: its structure or a shape differs.
        """
        self.execute(UpdateWeights(model_or_state))

    @contextmanager
    def weights(self, model_or_state: LanguageModel | nnx.State) -> Iterator[Self]:
        """Serve the caller's own arrays within a `with` block, without a copy of them.

        The block ends what the engine knows of them, so a train step may donate them. After the
        block the engine has no weights: a step is an error before `update_model_weights` or the
        next block. (Arrays of another type, place or layout are converted, which is a copy.)

        Args:
            model_or_state: see `update_model_weights`.
        """
        self.execute(UpdateWeights(model_or_state, copy=False))
        try:
            yield self
        finally:
            self.execute(DropWeights())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, those in host memory too.

        Requests in flight keep their tokens, which are computed anew.
        """
        self.execute(ResetPrefixCache())

    def pause(self) -> None:
        """Stop stepping. With `destroy_pages_on_pause` the pages' memory is freed; requests in
        flight stay queued and are computed anew after `resume`."""
        self.execute(Pause(free_pages=self.config.destroy_pages_on_pause))

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return self.loop.paused

    def resume(self) -> None:
        """Go on after `pause`."""
        self.execute(Resume())

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the device to others, until `wake_up`.

        Requests in flight stay queued and are computed anew; adapters stay where they are.

        Args:
            level: 1 keeps the weights in host memory (on a CPU they are there, and stay); 2 forgets
                them: `update_model_weights` must come before `wake_up`.

        Raises:
            ConfigError: the level is neither.
            EasyDeLError: level 1, and the weights lie on devices of several processes.
        """
        self.execute(Sleep(keep_weights=check_level(level) == 1))

    @property
    def is_sleeping(self) -> bool:
        """Between `sleep` and `wake_up`."""
        return self.loop.asleep

    def wake_up(self) -> None:
        """Go on after `sleep`; nothing is compiled.

        Raises:
            ConfigError: there are no weights.
        """
        self.execute(WakeUp())


def check_level(level: int) -> int:
    """The level of `sleep`.

    Raises:
        ConfigError: it is none.
    """
    if level not in (1, 2):
        raise ConfigError(f"sleep has the levels 1 (keeps the weights) and 2, not {level!r}")
    return level
