"""From sections to objects: each function builds one thing, and imports what it needs.

An error that the input caused is raised with the place in the run file (`Blame`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, MeshError
from ed_infra.fields import canonical_field

from ed_elarge.checks import has_held_out, sequence_length
from ed_elarge.errors import InputError, KeyPath, Problem
from ed_elarge.normalize import Run
from ed_elarge.sections import TrainedTokenizer

if TYPE_CHECKING:
    from ed_data.loader import Loader
    from ed_esurge.engine import eSurge
    from ed_models.module import EasyDeLBaseModule
    from ed_trainers.trainer import Trainer


@contextmanager
def blame(run: Run, *path: Any) -> Iterator[None]:
    """Give errors of the input the place of `path`, which starts at the sections."""
    with blame_at(run, (*run.origin.prefix, *path)):
        yield


@contextmanager
def blame_at(run: Run, path: KeyPath) -> Iterator[None]:
    """Give errors of the input the place of `path`, which starts at the top of the file.

    A mesh that does not fit is the fault of `sharding.axis_dims`, wherever it shows. Without a file
    errors pass as they are.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not run.origin.document.text or not _is_about_input(error):
            raise
        if isinstance(error, MeshError):
            path = (*run.origin.prefix, "sharding", "axis_dims")
        raise run.origin.error([Problem(path, str(error), on_key=True)]) from error


def _is_about_input(error: Exception) -> bool:
    data = sys.modules.get("ed_data.errors")
    return isinstance(error, (ConfigError, CheckpointError)) or (
        data is not None and isinstance(error, data.DataError)
    )


def directory(run: Run) -> Path:
    """Where this run writes: the trainer's directory, or the working directory."""
    return Path(run.trainer.save_directory) if run.trainer is not None else Path()


# The tokenizer.


def tokenizer(run: Run) -> Any:
    """Load the tokenizer, or train it on the training texts (once: it is kept in the run)."""
    from ed_elarge import training_tokenizer

    model = require_model(run)
    with blame(run, "model", "tokenizer"):
        if isinstance(model.tokenizer, TrainedTokenizer):
            return training_tokenizer.load_or_train(run, directory(run) / "tokenizer")
        name = str(model.tokenizer or model.name_or_path)
        return _load_tokenizer(run, name)


def _load_tokenizer(run: Run, name: str) -> Any:
    from transformers import AutoTokenizer

    extras = require_model(run).extra_kwargs
    trust = extras.trust_remote_code or run.loader.trust_remote_code
    options: dict[str, Any] = {"revision": extras.revision} if extras.revision else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"no tokenizer could be loaded from {name!r}: {reason}") from error


# The model.


def require_model(run: Run) -> Any:
    """The model section.

    Raises:
        InputError: there is none.
    """
    if run.model is None:
        raise run.origin.blame((), "the section 'model' is missing", on_key=True)
    return run.model


def config_changes(run: Run) -> dict[str, Any]:
    """Fields of the model's config that `sharding`, `platform` and `base_config` set."""
    sharding = run.sharding
    changes: dict[str, Any] = {
        "sharding_axis_dims": sharding.axis_dims,
        "sharding_axis_names": sharding.axis_names,
        "sharding_dcn_axis_dims": sharding.dcn_axis_dims,
        "use_ring_of_experts": sharding.use_ring_of_experts,
        "fsdp_is_ep_bound": sharding.fsdp_is_ep_bound,
        "sp_is_ep_bound": sharding.sp_is_ep_bound,
        "backend": run.platform.backend,
        "platform": run.platform.platform,
        "operation_configs": run.base_config.operation_configs or None,
    }
    if not sharding.auto_shard_model:
        changes["sharding_rules"] = ((".*", ()),)
    changes = {name: value for name, value in changes.items() if value is not None}
    for key, value in run.base_config.values.items():
        changes[canonical_field(key)] = value
    return changes


def model(run: Run, tokenizer: Any) -> EasyDeLBaseModule:
    """Load the model, or make a new one from `model.config`, on its devices."""
    section = require_model(run)
    built = _new_model(run, tokenizer) if section.config is not None else _load_model(run, section)
    if run.loader.verbose:
        print(parameter_table(built))
    return built


def _new_model(run: Run, tokenizer: Any) -> EasyDeLBaseModule:
    from ed_infra import registry

    section = require_model(run)
    given = {canonical_field(key): value for key, value in section.config.items()}
    model_type = given.pop("model_type")
    of_tokenizer = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with blame(run, "model", "config"):
        config = registry.get_config(model_type)(**of_tokenizer | given | config_changes(run))
        if config.vocab_size < len(tokenizer):
            raise ConfigError(
                f"vocab_size {config.vocab_size} is less than the tokenizer's {len(tokenizer)} "
                "tokens: raise it, or leave it out"
            )
        module = registry.get_module(_task(run), model_type)
        seed = run.trainer.seed if run.trainer is not None else 0
        return module.create(config, seed=seed, **_dtypes(run))


def _load_model(run: Run, section: Any) -> EasyDeLBaseModule:
    from ed_infra import registry
    from ed_models import hub

    changes = config_changes(run)
    dims = changes.pop("sharding_axis_dims")
    with blame(run, "model", "name_or_path"):
        local = hub.resolve(section.name_or_path, revision=section.extra_kwargs.revision)
        known = hub.read_config(local)
        module = registry.get_module(_task(run), known.model_type)
        return module.from_pretrained(
            local, sharding_axis_dims=dims, config_kwargs=changes, **_dtypes(run)
        )


def _task(run: Run) -> TaskType:
    """`auto-bind` is what this version can train and serve."""
    task = require_model(run).task
    return TaskType.CAUSAL_LM if task == TaskType.AUTO_BIND else task


def _dtypes(run: Run) -> dict[str, Any]:
    loader = run.loader
    precision = None if loader.precision in (None, "default") else loader.precision
    return {"dtype": loader.dtype, "param_dtype": loader.param_dtype, "precision": precision}


def parameter_table(model: EasyDeLBaseModule) -> str:
    """One line for each parameter: name, shape, dtype and sharding."""
    import jax
    from ed_infra import paths
    from flax import nnx

    lines, total = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        names = paths.canonical(path)
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        spec = getattr(leaf.sharding, "spec", "one device")
        lines.append(f"  {name}  {list(leaf.shape)}  {leaf.dtype}  {spec}")
        total += leaf.size
    return "\n".join([*lines, f"  {total:,} parameters"])


# Data and training.


def loaders(run: Run, tokenizer: Any) -> tuple[Loader, Loader | None]:
    """The training batches and, where the mixture holds texts out, those of evaluation."""
    from ed_data import build_loader

    if run.mixture is None:
        raise run.origin.blame((), "the section 'mixture' is missing", on_key=True)
    length, _ = sequence_length(run.trainer, run.mixture)
    options: dict[str, Any] = {
        "seq_length": length,
        "seed": run.mixture.seed if run.mixture.seed is not None else 0,
    }
    batch_size = run.mixture.batch_size or 1
    with blame(run, "mixture"):
        train = build_loader(
            run.mixture, tokenizer, batch_size=batch_size, split="train", **options
        )
        if not has_held_out(run.mixture):
            return train, None
        if run.trainer is not None and run.trainer.eval_batch_size:
            batch_size = run.trainer.eval_batch_size
        held_out = build_loader(
            run.mixture, tokenizer, batch_size=batch_size, split="eval", **options
        )
        return train, held_out


def held_out_texts(run: Run) -> list[str]:
    """The texts that the mixture sets aside; none where it sets none aside."""
    from ed_data import texts

    if not has_held_out(run.mixture):
        return []
    with blame(run, "mixture"):
        return list(texts(run.mixture, "eval"))


def trainer(run: Run, model: Any, tokenizer: Any, train: Any, held_out: Any) -> Trainer:
    """The trainer of the `trainer` section."""
    from ed_trainers.methods import trainer_class

    if run.trainer is None:
        raise run.origin.blame((), "the section 'trainer' is missing", on_key=True)
    with blame(run, "trainer"):
        return trainer_class(run.trainer.trainer_type)(
            run.trainer, model, train, held_out, tokenizer
        )


# Serving.


def engine(run: Run, model: Any, tokenizer: Any) -> eSurge:
    """The engine of the `esurge` section around a model."""
    from ed_esurge.engine import eSurge

    with blame(run, "esurge"):
        return eSurge(model, tokenizer, run.esurge)
