"""From sections to objects: each function builds one part, and imports what it needs.

`Parts` builds a part when it is first asked for, by the builder that `ed_elarge.table` names, and
keeps it. An error that the input caused is raised with its place in the run file.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ed_data.errors import DataError
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.fields import canonical_field

from ed_elarge.run_config import RunConfig
from ed_elarge.sections import ModelSection, TrainedTokenizer
from ed_elarge.table import SECTIONS

if TYPE_CHECKING:
    from ed_data.loader import Loader
    from ed_esurge.engine import eSurge
    from ed_infra.config import EasyDeLBaseConfig
    from ed_models.module import EasyDeLBaseModule
    from ed_trainers.trainer import Trainer
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_OWNER = {part: name for name, section in SECTIONS.items() for part in section.builds or ()}


class Parts:
    """What is built of one configuration; each part once.

    Args:
        run: the configuration.
    """

    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self._built: dict[str, Any] = {}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Loaded, or trained on the training texts."""
        return self.get("tokenizer")

    @property
    def model(self) -> EasyDeLBaseModule:
        """Loaded, or new, on its devices."""
        return self.get("model")

    @property
    def loaders(self) -> tuple[Loader, Loader | None]:
        """The training batches and, where the mixture holds texts out, those of evaluation."""
        return self.get("loaders")

    @property
    def held_out_texts(self) -> list[str]:
        """The texts that training does not see; none where the mixture holds none out."""
        return self.get("held_out_texts")

    @property
    def trainer(self) -> Trainer:
        """The trainer with model, tokenizer and data."""
        return self.get("trainer")

    @property
    def engine(self) -> eSurge:
        """The serving engine around the model."""
        return self.get("engine")

    def get(self, part: str) -> Any:
        """A part of the table, built by its builder.

        Raises:
            InputError: the section that it is built of is missing, or cannot be built.
        """
        section = _OWNER[part]
        if self.run.sections[section] is None:
            raise self.run.missing(section)
        with self.run.blame(section):
            return self.once(
                part, lambda: pkgutil.resolve_name((SECTIONS[section].builds or {})[part])(self)
            )

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returned when `name` was first asked for."""
        if name not in self._built:
            self._built[name] = make()
        return self._built[name]

    def forget(self, part: str) -> None:
        """Let go of one part; it is built anew when it is asked for."""
        self._built.pop(part, None)

    def close(self) -> None:
        """Let go of everything that was built."""
        for loader in self._built.get("loaders") or ():
            if loader is not None:
                loader.close()
        self._built.clear()


# The tokenizer.


def tokenizer(parts: Parts) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train it on the training texts (once: it is kept in the run)."""
    from ed_elarge import training_tokenizer

    run = parts.run
    section = _model_section(run)
    with run.blame("model", "tokenizer"):
        if isinstance(section.tokenizer, TrainedTokenizer):
            return training_tokenizer.load_or_train(
                section.tokenizer.train, run.mixture, run.directory / "tokenizer"
            )
        return _load_tokenizer(run, str(section.tokenizer or section.name_or_path))


def _load_tokenizer(run: RunConfig, name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    extras = _model_section(run).extra_kwargs
    trust = extras.trust_remote_code or run.loader.trust_remote_code
    options: dict[str, Any] = {"revision": extras.revision} if extras.revision else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"no tokenizer could be loaded from {name!r}: {reason}") from error


# The model.


def model(parts: Parts) -> EasyDeLBaseModule:
    """Load the model, or make a new one from `model.config`, on its devices."""
    made = _new_model(parts) if _model_section(parts.run).config is not None else _load(parts.run)
    for section in SECTIONS.values():
        if section.finishes:
            made = pkgutil.resolve_name(section.finishes)(parts, made)
    return made


def new_config(run: RunConfig, of_tokenizer: dict[str, Any] | None = None) -> EasyDeLBaseConfig:
    """The configuration of a new model.

    Args:
        run: what the user wrote; it has `model.config`.
        of_tokenizer: fields that the tokenizer sets where the user does not; none, for a first look
            before there is a tokenizer.
    """
    from ed_infra import registry

    section = _model_section(run)
    fields = {canonical_field(key): value for key, value in (section.config or {}).items()}
    changes = {field: value for field, (_, value) in run.config_fields().items()}
    with run.blame("model", "config"):
        model_type = fields.pop("model_type")
        return registry.get_config(model_type)(**(of_tokenizer or {}) | fields | changes)


def _new_model(parts: Parts) -> EasyDeLBaseModule:
    from ed_infra import registry

    run, tokens = parts.run, parts.tokenizer
    config = new_config(
        run,
        {
            "vocab_size": len(tokens),
            "bos_token_id": tokens.bos_token_id,
            "eos_token_id": tokens.eos_token_id,
            "pad_token_id": tokens.pad_token_id,
        },
    )
    with run.blame("model", "config"):
        if config.vocab_size < len(tokens):
            raise ConfigError(
                f"vocab_size {config.vocab_size} is less than the tokenizer's {len(tokens)} "
                "tokens: raise it, or leave it out"
            )
        module = registry.get_module(_task(run), config.model_type)
        seed = run.trainer.seed if run.trainer is not None else 0
        return module.create(config, seed=seed, **_dtypes(run))


def _load(run: RunConfig) -> EasyDeLBaseModule:
    from ed_infra import registry
    from ed_models import hub

    section = _model_section(run)
    changes = {"sharding_axis_names": run.sharding.axis_names}
    changes |= {field: value for field, (_, value) in run.config_fields().items()}
    dims = changes.pop("sharding_axis_dims", run.sharding.axis_dims)
    with run.blame("model", "name_or_path"):
        local = hub.resolve(section.name_or_path, revision=section.extra_kwargs.revision)
        module = registry.get_module(_task(run), hub.read_config(local).model_type)
        return module.from_pretrained(
            local, sharding_axis_dims=dims, config_kwargs=changes, **_dtypes(run)
        )


def _model_section(run: RunConfig) -> ModelSection:
    if run.model is None:
        raise run.missing("model")
    return run.model


def _task(run: RunConfig) -> TaskType:
    """`auto-bind` is what this version can train and serve."""
    task = _model_section(run).task
    return TaskType.CAUSAL_LM if task == TaskType.AUTO_BIND else task


def _dtypes(run: RunConfig) -> dict[str, Any]:
    loader = run.loader
    precision = None if loader.precision in (None, "default") else loader.precision
    return {"dtype": loader.dtype, "param_dtype": loader.param_dtype, "precision": precision}


def show_parameters(parts: Parts, model: EasyDeLBaseModule) -> EasyDeLBaseModule:
    """With `loader.verbose`, print each parameter: name, shape, dtype and sharding."""
    if not parts.run.loader.verbose:
        return model
    import jax
    from ed_infra import paths
    from flax import nnx

    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        names = paths.canonical(path)
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        spec = getattr(leaf.sharding, "spec", "one device")
        print(f"  {name}  {list(leaf.shape)}  {leaf.dtype}  {spec}")
        total += leaf.size
    print(f"  {total:,} parameters")
    return model


# Data and training.


def look_ahead(run: RunConfig) -> None:
    """Find early what would otherwise show after hours of reading: before anything is tokenized.

    The configuration of a new model is made, its mesh laid over the devices, and one document of
    each source is read, through its functions and renamed fields.

    Raises:
        InputError: one of these cannot be done.
    """
    from ed_data import documents

    if run.model is not None and run.model.config is not None:
        config = new_config(run)
        with run.blame("model", "config"):
            config.mesh  # noqa: B018 - making it is the check
    for key in ("informs", "eval_informs"):
        for i, inform in enumerate(getattr(run.mixture, key, ())):
            try:
                next(iter(documents(inform)), None)
            except DataError as error:
                names = [n for n in inform.model_fields_set if re.search(rf"\b{n}\b", str(error))]
                with run.blame("mixture", key, i, *sorted(names)[:1]):
                    raise


def loaders(parts: Parts) -> tuple[Loader, Loader | None]:
    """The training batches and, where the mixture holds texts out, those of evaluation."""
    from ed_data import build_loader

    run, tokens = parts.run, parts.tokenizer
    mixture, trainer = run.mixture, run.trainer
    options: dict[str, Any] = {"seq_length": run.sequence_length[0], "seed": mixture.seed or 0}
    train = build_loader(mixture, tokens, batch_size=run.batch_size, split="train", **options)
    if not run.has_held_out:
        return train, None
    size = (trainer.eval_batch_size if trainer is not None else None) or run.batch_size
    return train, build_loader(mixture, tokens, batch_size=size, split="eval", **options)


def held_out_texts(parts: Parts) -> list[str]:
    """The texts that the mixture sets aside; none where it sets none aside."""
    from ed_data import texts

    return list(texts(parts.run.mixture, "eval")) if parts.run.has_held_out else []


def trainer(parts: Parts) -> Trainer:
    """The trainer of the section `trainer`.

    A method that learns from completions of its own gets them from here too: this is the one place
    that knows both the trainer and the engine.
    """
    from ed_trainers.methods import trainer_class

    train, held_out = parts.loaders
    arguments = parts.run.trainer
    method = trainer_class(arguments.trainer_type)
    return method(arguments, parts.model, train, held_out, parts.tokenizer)


# Serving.


def engine(parts: Parts) -> eSurge:
    """The engine of the section `esurge` around the model."""
    from ed_esurge.engine import eSurge

    return eSurge(parts.model, parts.tokenizer, parts.run.esurge)
