"""Addresses of EasyLM's checkpoints (`params::FILE`), and the models that the files contain."""

from __future__ import annotations

from pathlib import Path

from ed_infra.errors import ConfigError, unknown_name

#: Kind of an address -> what its file contains.
KINDS = {
    "params": "a stream of parameters",
    "trainstate": "a stream of a whole training state",
    "trainstate_params": "the parameters of a stream of a whole training state",
    "flax_params": "one msgpack object of flax with the parameters",
}


def parse_address(text: str) -> tuple[str, str]:
    """Split `KIND::PATH`; a path without a kind has the kind `params`.

    Raises:
        ConfigError: The kind is unknown.
    """
    kind, mark, path = text.partition("::")
    if not mark:
        return "params", text
    if kind not in KINDS:
        raise unknown_name("kind of checkpoint", kind, KINDS)
    return kind, path


def convert_to_model(
    kind: str, source: Path, target: Path, config: str | Path | None = None
) -> Path | None:
    """Write the model of a file, or of a checkpoint of a run, in Hugging Face layout.

    Args:
        kind: A key of `KINDS`.
        source: A stream, a file of flax, or a checkpoint of a run.
        target: The directory to write.
        config: For a file: the directory with the model's `config.json`. None: the folder of the
            file.

    Returns:
        The directory with the tokenizer, if there is one.

    Raises:
        ConfigError: The address names the state of an optimizer, which is not read.
        CheckpointError: The file is damaged, or contains another model.
    """
    from ed_trainers.convert import convert, tokenizer_of

    if kind == "trainstate":
        raise ConfigError(
            f"trainstate::{source}: the optimizer's state of EasyLM is not read; write "
            f"trainstate_params::{source} for the parameters of this file"
        )
    if source.is_dir():
        convert(source, target)
        return tokenizer_of(source)
    settings = config or source.parent
    convert(source, target, config=settings)
    return Path(settings)
