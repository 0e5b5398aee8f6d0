"""`AutoStateForCausalLM` and its relatives: training states of pretrained or new models.

`ed_models.auto` has one class `AutoEasyDeLModel...` for each of them, with the same end of the
name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import optax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import did_you_mean
from ed_models import auto
from ed_models.protocol import LanguageModel

from ed_trainers.state import EasyDeLState

_STATE, _MODEL, _ANY = "AutoState", "AutoEasyDeLModel", "AutoEasyDeL"


class AutoState:
    """The state of a model of any task. The class methods load or create the model."""

    auto_model: ClassVar[Any] = auto.AutoEasyDeLModel

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} has no instances: use {name}.from_pretrained(...) or from_config")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        tx: optax.GradientTransformation | None = None,
        **options: object,
    ) -> EasyDeLState:
        """Load a model and return its state.

        Args:
            name_or_path: a directory in Hugging Face layout, or a hub id.
            tx: optimizer; its state is created. None: the state has no optimizer.
            options: see `from_pretrained` of the `Auto` class of models.
        """
        return _state(cls.auto_model.from_pretrained(name_or_path, **options), tx)

    @classmethod
    def from_config(
        cls,
        config: EasyDeLBaseConfig,
        *,
        tx: optax.GradientTransformation | None = None,
        **options: object,
    ) -> EasyDeLState:
        """Create a model with random parameters and return its state; see `from_pretrained`."""
        return _state(cls.auto_model.from_config(config, **options), tx)


def _state(model: LanguageModel, tx: optax.GradientTransformation | None) -> EasyDeLState:
    return EasyDeLState.create(model=model, tx=tx, init_opt_state=tx is not None)


@cache
def __getattr__(name: str) -> type[AutoState]:
    """Return the class of states for an `Auto` class of models."""
    models = {n.replace(_MODEL, _STATE).replace(_ANY, _STATE): n for n in auto_class_names()}
    if name not in models:
        hint = did_you_mean(name, models)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    model = getattr(auto, models[name])
    return type(name, (AutoState,), {"auto_model": model, "__module__": __name__})


def auto_class_names() -> list[str]:
    """Return the names of the `Auto` classes of models that have a class of states."""
    return [n for n in vars(auto) if n.startswith(_ANY) and n not in (_MODEL, f"{_ANY}Config")]
