"""A model and its tokenizer from a directory or a hub id, and the engine around them."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.compile_cache import keep_compiled_programs
from ed_infra.errors import ConfigError

from ed_esurge.command.flags import add_options, mapping_of, options_of
from ed_esurge.config import EngineConfig

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge

_DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which model, how it is loaded, and the options of the engine."""
    parser.add_argument("model", metavar="MODEL", help="a directory, or a hub id")
    group = parser.add_argument_group("model")
    group.add_argument("--tokenizer", help="a directory, or a hub id; default: the model's own")
    group.add_argument("--revision", help="branch, tag or commit of a hub repository")
    group.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help="of weights and computation; auto: float32 on a CPU, bfloat16 elsewhere",
    )
    group.add_argument(
        "--sharding-axis-dims",
        metavar="N,N,N,N,N",
        default="1,1,1,-1,1",
        help="devices along (dp, fsdp, ep, tp, sp); -1 takes what remains (%(default)s)",
    )
    group.add_argument(
        "--config-kwargs",
        metavar="JSON",
        help="further fields of the model's configuration",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the tokenizer's repository run its own Python code",
    )
    add_options(parser, EngineConfig, "engine")


def engine_of(values: argparse.Namespace) -> eSurge:
    """The engine that the arguments describe; options are checked before anything is loaded.

    Raises:
        EasyDeLError: an option is wrong, or the model cannot be loaded.
    """
    options = options_of(values, EngineConfig)
    fields = mapping_of(values.config_kwargs, "--config-kwargs")
    dims = dims_of(values.sharding_axis_dims)
    logger = logging.getLogger("ed_esurge")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    import jax
    from ed_models.checkpoints import hub

    keep_compiled_programs()
    from ed_esurge.engine import eSurge

    dtype = values.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if jax.default_backend() == "cpu":
        # The layout of the engine there (`served_model`): no second copy while it is made.
        fields = {"scan_layers": False, **fields}
    model: Any = hub.from_pretrained(
        values.model,
        task="auto-bind",
        dtype=dtype,
        param_dtype=dtype,
        sharding_axis_dims=dims,
        config_kwargs=fields,
        revision=values.revision,
    )
    return eSurge(model, tokenizer_of(values), options, model_name=name_of(values.model))


def tokenizer_of(values: argparse.Namespace) -> Any:
    """The tokenizer that the arguments name.

    Raises:
        CheckpointError: there is none.
    """
    from ed_models.checkpoints.tokenizers import load_tokenizer

    return load_tokenizer(
        values.tokenizer or values.model,
        revision=None if values.tokenizer else values.revision,
        trust_remote_code=values.trust_remote_code,
    )


def name_of(model: str) -> str:
    """What clients call it: the hub id, or the last part of a directory."""
    return Path(model).resolve().name if Path(model).expanduser().is_dir() else model


def dims_of(text: str) -> tuple[int, ...]:
    """Devices along the axes of the mesh.

    Raises:
        ConfigError: it is no list of whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--sharding-axis-dims is numbers with commas between, such as 1,1,1,-1,1, not {text!r}"
        ) from None
