"""Training of a tokenizer on the texts of the run. Later runs load the stored tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ed_data.cache import exclusive
from ed_data.config import Inform, Mixture
from ed_data.rows.exclusion import read_hashes
from ed_data.schema import TEXT, Schema
from ed_infra.errors import ConfigError

from ed_elarge.config.sections import TokenizerTraining

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RECORD = "trained_on.json"
T = TypeVar("T")


def load_or_train(
    options: TokenizerTraining,
    mixture: Mixture,
    directory: Path,
    schema: Schema = TEXT,
    *,
    mask_token: bool = False,
    special_tokens: Sequence[str] = (),
    resumes: bool = False,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model.tokenizer.train`.

    The tokenizer is stored in `directory` with a record of its options and data. If they change,
    the tokenizer is trained again. Held-out texts are not read. `mask_token` adds a mask
    token, and `special_tokens` adds others. `resumes` protects the tokenizer of a run with
    checkpoints.

    Raises:
        ConfigError: The run resumes, and its tokenizer has other options or data.
        DataError: There is no text, or a source cannot be read.
    """

    def make() -> PreTrainedTokenizerBase:
        from ed_data import texts, train_bpe

        print(f"training a tokenizer of {options.vocab_size} tokens", flush=True)
        pairs = any(column.second is not None for column in schema.columns)
        # sentence-transformers would apply a chat template to the two texts of a pair.
        template = {"chat_template": None} if pairs else {}
        return train_bpe(
            texts(mixture, "train", schema=schema),
            options.vocab_size,
            min_frequency=options.min_frequency,
            mask_token=mask_token,
            special_tokens=special_tokens,
            **template,
        )

    def load(folder: Path) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        # transformers would save these facts of the load with the tokenizer.
        for name in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(name, None)
        return tokenizer

    facts: dict[str, Any] = {"mask_token": True} if mask_token else {}
    facts |= {"special_tokens": list(special_tokens)} if special_tokens else {}
    return kept_or_made(options, mixture, directory, schema, make, load, facts, resumes=resumes)


def kept_or_made(
    options: TokenizerTraining,
    mixture: Mixture,
    directory: Path,
    schema: Schema,
    make: Callable[[], T],
    load: Callable[[Path], T],
    facts: Mapping[str, Any],
    *,
    resumes: bool = False,
) -> T:
    """Return the tokenizer or processor in `directory` if its record is equal; else make it.

    Args:
        options: the options of the training.
        mixture: the texts.
        directory: the folder of the tokenizer and its record.
        schema: the fields of the texts.
        make: makes and returns the tokenizer or processor.
        load: returns the one in a folder.
        facts: further values that determine the result.
        resumes: whether the checkpoints next to `directory` are continued.

    Raises:
        ConfigError: the run resumes, and its tokenizer has other options or data.
    """
    if mixture.exclude is not None:
        facts = {**facts, "excluded": read_hashes(mixture.exclude).tolist()}
    record = _record(options, mixture, schema, facts)
    if _is_kept(directory, record):
        return load(directory)
    if resumes and (directory / _RECORD).exists():
        steps = [p for p in (directory.parent / "checkpoints").glob("*") if p.name.isdigit()]
        if steps:
            raise ConfigError(
                f"the checkpoints in {directory.parent} use a tokenizer that was trained with "
                "other options or on other data than the run file has now: change them back, or "
                "set another trainer.save_directory (trainer.resume_if_possible: false moves the "
                "earlier run aside)"
            )
    new_part = make()
    _publish(new_part, record, directory)
    return new_part


def _record(
    options: TokenizerTraining, mixture: Mixture, schema: Schema, more: Mapping[str, Any]
) -> str:
    """Return the options and data that determine the tokenizer, as text."""
    from ed_data.rows.documents import fingerprint_documents
    from ed_data.sources import open_source

    def of(informs: Sequence[Inform]) -> list[dict[str, Any]]:
        return [fingerprint_documents(inform, open_source(inform), schema) for inform in informs]

    facts = {
        "informs": of(mixture.informs),
        "held_out": [mixture.eval_fraction, of(mixture.eval_informs)],
        "options": options.model_dump(mode="json"),
        **more,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest(), **facts["options"]})


def _is_kept(directory: Path, record: str) -> bool:
    try:
        return (directory / _RECORD).read_text() == record
    except (FileNotFoundError, NotADirectoryError):
        return False


def _publish(tokenizer: Any, record: str, directory: Path) -> None:
    """Write a temporary folder and rename it: a crash causes no incomplete tokenizer.

    The processes of a run may publish the same tokenizer. The first of them is kept, because the
    others may already read that folder.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    tokenizer.save_pretrained(part)
    (part / _RECORD).write_text(record)
    part.chmod(0o755)  # mkdtemp creates a private folder
    with exclusive(directory.parent):
        if not _is_kept(directory, record):
            shutil.rmtree(directory, ignore_errors=True)  # of other options or data
            try:
                part.rename(directory)
            except OSError:  # without locks, another process can be faster
                if not _is_kept(directory, record):
                    raise
    shutil.rmtree(part, ignore_errors=True)
