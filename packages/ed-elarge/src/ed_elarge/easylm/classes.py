"""The classes of EasyLM's documentation, with the parts of this project.

`EasyLM.models.llama.LLaMAModel`, `EasyLM.data.DataProcessor`, `EasyLM.optimizers.create_optimizer`,
`EasyLM.serving.ModelServer` and `EasyLM.checkpoint.CheckpointManager` are these names. A
configuration is a run file: its path, or a mapping of its sections.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_trainers.checkpoints.manager import CheckpointManager
from ed_trainers.options.base import TrainingArguments
from ed_trainers.state import EasyDeLState
from ed_trainers.state import create_optimizer as _create_optimizer
from flax import nnx

from ed_elarge.easylm import checkpoints
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    import optax

__all__ = ["CheckpointManager", "DataProcessor", "LLaMAModel", "ModelServer", "create_optimizer"]

Config = Mapping[str, Any] | str | Path

#: Port of EasyLM's servers.
PORT = 5007


class LLaMAModel:
    """A model that is trained by `train_step`, and served by `ModelServer`.

    Args:
        config: A run file with the section `model`.
    """

    def __init__(self, config: Config) -> None:
        self.elm = eLargeModel(config)
        self._state: EasyDeLState | None = EasyDeLState.create(model=self.elm.build_model())
        self._compiled: Any = None

    @classmethod
    def load_checkpoint(cls, path: str | Path, *, config: str | Path | None = None) -> Self:
        """Load a model from the present contents of a file.

        A file is converted at each call, into a temporary folder that is removed with the model.

        Args:
            path: A directory in Hugging Face layout, a checkpoint of a run, or a file of EasyLM
                (`params::FILE`, `trainstate_params::FILE` and `flax_params::FILE` also name one).
            config: For a file: the directory with the model's `config.json`. None: the folder of
                the file.
        """
        kind, name = checkpoints.parse_address(str(path))
        file = Path(name)
        if not file.is_file() and not (file / "arrays").is_dir():
            return cls({"model": {"name_or_path": name}})
        copy = tempfile.TemporaryDirectory(prefix="easylm-")
        target = Path(copy.name) / file.name
        model: dict[str, Any] = {"name_or_path": str(target)}
        tokenizer = checkpoints.convert_to_model(kind, file, target, config)
        if tokenizer is not None:
            model["tokenizer"] = str(tokenizer)
        self = cls({"model": model})
        weakref.finalize(self.elm, copy.cleanup)
        return self

    @property
    def state(self) -> EasyDeLState:
        """The training state: step, parameters, and the state of the optimizer."""
        assert self._state is not None
        return self._state

    @property
    def module(self) -> Any:
        """The module with the present parameters."""
        return self.state.model

    def train_step(
        self, batch: Mapping[str, np.ndarray], optimizer: optax.GradientTransformation
    ) -> float:
        """Update the parameters once, and return the mean cross-entropy of the batch.

        The state of the optimizer is created by the first step. Another optimizer starts anew.
        """
        if self._state is None or self.state.tx is not optimizer:
            self._state = self.state.init_tx(optimizer)
            self._compiled = jax.jit(_step, donate_argnums=0)
        arrays = {name: jnp.asarray(value) for name, value in batch.items()}
        self._state, loss = self._compiled(self._state, arrays)
        return float(loss)


def _step(state: EasyDeLState, batch: dict[str, jax.Array]) -> tuple[EasyDeLState, jax.Array]:
    inputs = {name: value for name, value in batch.items() if name != "labels"}

    def mean_loss(tree: nnx.State) -> jax.Array:
        model: Any = state.merge(tree)
        output, _ = model.compute_loss(labels=batch["labels"], **inputs)
        return output.loss

    loss, grads = jax.value_and_grad(mean_loss)(state.graphstate)
    return state.apply_gradients(grads=grads, value=loss), loss


def create_optimizer(
    model: LLaMAModel, arguments: TrainingArguments | None = None, *, total_steps: int | None = None
) -> Any:
    """Create the optimizer of the section `trainer`, or AdamW without one.

    Args:
        model: The model.
        arguments: Options; None: the section `trainer` of the model's configuration.
        total_steps: Number of steps of the schedule; None: `max_training_steps`.
    """
    training_arguments = arguments or model.elm.config.trainer
    return _create_optimizer(model.state, training_arguments, total_steps=total_steps)


class DataProcessor:
    """The batches of one epoch: arrays `input_ids`, `labels`, and others, by name.

    Args:
        config: A run file with the sections `model` (for the tokenizer), `mixture` and `trainer`.
    """

    def __init__(self, config: Config) -> None:
        self.elm = eLargeModel(config)
        self.loader = self.elm.build_dataset()

    def __len__(self) -> int:
        return self.loader.steps_per_epoch or 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        loader: Any = self.loader
        if not hasattr(loader, "batch_at"):  # a stream
            yield from loader
            return
        for step in range(len(self)):
            yield dict(loader.batch_at(step))


class ModelServer:
    """An HTTP server with the routes of EasyLM and of OpenAI.

    Args:
        model: A model with a tokenizer.
        host: Address; `0.0.0.0` listens on every address of the machine.
        port: Port.
        options: Keys of the action `serve`.
    """

    def __init__(
        self, model: LLaMAModel, host: str = "127.0.0.1", port: int = PORT, **options: object
    ) -> None:
        if not isinstance(model, LLaMAModel):
            raise ConfigError(f"ModelServer serves a LLaMAModel, got {type(model).__name__}")
        self.model, self.options = model, {"host": host, "port": port, **options}

    def start(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        self.model.elm.use_model(self.model.module).serve(**self.options)
