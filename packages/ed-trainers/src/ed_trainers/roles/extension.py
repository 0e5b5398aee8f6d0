"""Variables that a method trains together with the model, such as a value head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.options.base import TrainingArguments
from ed_trainers.rollout import Weights


@dataclass(frozen=True)
class Extension:
    """Variables that a method trains together with the model, such as a value head.

    Attributes:
        attach: returns a module with the model's variables and the new ones; `arguments` may name a
            directory with saved variables.
        detach: returns the model without the new variables.
        split: returns `(graphdef, learned parameters, other variables)` of an extended module.
        owns_path: whether a path of a parameter belongs to the extension.
        save: writes the new variables to a directory of a saved model.
    """

    attach: Callable[[LanguageModel, TrainingArguments], LanguageModel]
    detach: Callable[[LanguageModel], LanguageModel]
    split: Callable[[LanguageModel], tuple[nnx.GraphDef, nnx.State, nnx.State]]
    owns_path: Callable[[Sequence[object]], bool]
    save: Callable[[LanguageModel, Path], None]


class PolicyWeights(Weights):
    """Lent weights of an extended module as the weights of the model alone."""

    def __init__(self, weights: Weights, extension: Extension):
        self._whole, self._extension, self.version = weights, extension, weights.version
        self.graphdef = nnx.graphdef(cast(nnx.Module, self.model))

    @property
    def model(self) -> LanguageModel:
        """See `Weights.model`."""
        return self._extension.detach(self._whole.model)

    @property
    def state(self) -> nnx.State:
        """See `Weights.state`."""
        return nnx.state(cast(nnx.Module, self.model))

    @property
    def trained(self) -> nnx.State:
        """See `Weights.trained`."""
        return self.state

    def end(self) -> None:
        """See `Weights.end`."""
        self._whole.end()
