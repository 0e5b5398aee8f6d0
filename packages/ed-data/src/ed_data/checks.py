"""Checks of a mixture that need its data: unresolved names and keys without effect.

The checks need neither jax nor a tokenizer and finish in milliseconds, so they run before slow work
starts.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from ed_data.config import Media, Mixture
from ed_data.config.source import FILE_TYPES, Inform
from ed_data.errors import DataError, KeyPath, listing
from ed_data.rows.audio import RECORDING_KEYS
from ed_data.schema import TEXT, Schema

#: The path of a key in the mixture, and a message about it.
Remark = tuple[KeyPath, str]
_LARGE = 2**26  # bytes; a json file with one list must be read completely


def check_names(mixture: Mixture, schema: Schema = TEXT, *, imports: bool = True) -> list[Remark]:
    """Resolve every name that a mixture would otherwise resolve while rows are read.

    The check imports `format_callback`, `preprocessing_fn` and the objects of type python, and
    looks up the fields in the first row of local files.

    Args:
        mixture: The mixture.
        schema: The fields that the rows need.
        imports: False imports no code of the user: informs with functions or of type python, and
            files that do not exist, are not checked.

    Returns:
        For each unresolved name, the path of its key and a message.
    """
    return [
        ((key, i, *path), message)
        for key in ("informs", "eval_informs")
        for i, inform in enumerate(getattr(mixture, key))
        if imports or _is_plain(inform)
        for path, message in _names(inform, schema, mixture.media)
    ]


def find_unsupported_keys(mixture: Mixture, schema: Schema) -> Iterator[Remark]:
    """Yield the keys that a kind of rows does not support, and the reasons."""
    yield from schema.kind.checks(mixture, schema)
    if any(column.stride is not None for column in schema.columns):
        # The number of windows of a row is known after the row is encoded.
        for name in ("streaming", "pack_on_the_fly"):
            if getattr(mixture, name):
                reason = (
                    f"{name} is not available for questions about a context, whose windows are "
                    f"read from the cache: set {name}: false"
                )
                yield (name,), reason
        if mixture.save is not None:
            yield ("save",), "windows of a context cannot be saved: omit save"


def without_tokens(mixture: Mixture) -> list[Remark]:
    """Return the informs with images, which a loader without a processor cannot represent."""
    reason = (
        "but a loader without a processor creates batches of text: pass the processor of the "
        "model to build_loader, save the mixture with save_mixture, or use build_prompts"
    )
    return [
        ((key, i, "type"), f"inform {inform.label!r} has images, {reason}")
        for key in ("informs", "eval_informs")
        for i, inform in enumerate(getattr(mixture, key))
        if inform.is_visual
    ]


def without_recordings(mixture: Mixture) -> list[Remark]:
    """Return the keys of recordings, which only models that read recordings use."""
    remarks: list[Remark] = [
        ((of, i, key), f"{key} requires a model of speech: omit it, or train such a model")
        for of in ("informs", "eval_informs")
        for i, inform in enumerate(getattr(mixture, of))
        for key in sorted(RECORDING_KEYS & inform.model_fields_set)
    ]
    return remarks + without_transcripts(mixture)


def without_transcripts(mixture: Mixture) -> list[Remark]:
    """Return the keys of transcripts, which only models of speech write."""
    remarks: list[Remark] = []
    for key in ("language", "task"):
        if getattr(mixture.tokenization, key) is not None:
            reason = f"{key} requires recordings, whose transcripts begin with its token: omit it"
            remarks.append((("tokenization", key), reason))
    return remarks


def _names(inform: Inform, schema: Schema, media: Media) -> Iterator[Remark]:
    # Checks that read no rows need no readers, whose imports need a fifth of a second.
    from ed_data.rows.documents import Documents, function
    from ed_data.sources.python import resolve_address

    for key in ("format_callback", "preprocessing_fn"):
        try:
            function(inform, key)
        except DataError as error:
            yield (key,), str(error)
    try:
        if inform.kind == "python":
            resolve_address(str(inform.data_files), inform.label)
        # A callback may create any field, and `preprocessing_fn` any content.
        if inform.format_callback is None and _is_near(inform):
            content = {"preprocessing_fn": _any_text} if inform.preprocessing_fn else {}
            one = inform.replace(num_rows=1, **content)
            first = Documents(one, schema=schema, media=media)
            if schema.kind.other_schema is not None and first.has_completions():
                first = Documents(one, schema=schema.kind.other_schema, media=media)
            first.check_first_row()
            next(iter(first), None)
    except DataError as error:
        yield error.path or ("data_files",), str(error)


def _is_plain(inform: Inform) -> bool:
    """Return whether an inform is local files that exist, without functions."""
    functions = inform.format_callback is not None or inform.preprocessing_fn is not None
    if functions or inform.kind not in FILE_TYPES:
        return False
    return any(glob.glob(os.path.expanduser(file), recursive=True) for file in inform.files)


def _any_text(content: object) -> str:
    return "text"


def _is_near(inform: Inform) -> bool:
    """Return whether the first row can be read quickly."""
    if inform.kind not in FILE_TYPES:
        return inform.kind == "python"
    path = inform.files[0]
    return "://" not in path and not (
        inform.kind == "json" and os.path.isfile(path) and os.path.getsize(path) > _LARGE
    )


def idle_options(mixture: Mixture, schema: Schema = TEXT) -> list[Remark]:
    """Return the keys that are set but have no effect because of another key.

    Returns:
        For each key, its path and the reason, for a warning.
    """
    set_here = mixture.model_fields_set
    remarks: list[Remark] = []

    def idle(reason: str, *keys: str) -> None:
        remarks.extend(
            ((key,), f"{key} has no effect: {reason}") for key in keys if key in set_here
        )

    if not mixture.pack_tokens:
        shuffling = ("pack_shuffle", "pack_shuffle_buffer_factor")
        idle("pack_tokens is off", "pack_seq_length", "pack_strategy", *shuffling)
    elif not mixture.pack_shuffle:
        idle("pack_shuffle is off", "pack_shuffle_buffer_factor")
    if not mixture.block_mixture:
        idle("block_mixture is off", "mixture_block_size")
    if mixture.mixture_weights is None:
        idle("there are no mixture_weights", "stop_strategy")
    elif mixture.weights is None:
        names = listing(inform.label for inform in mixture.informs)
        weights_reason = (
            f"no inform has one of its names: set the name of each inform (now {names})"
        )
        idle(weights_reason, "mixture_weights")
        idle("mixture_weights has no effect", "stop_strategy")
    elif len(mixture.informs) == 1:
        idle("there is only one inform", "mixture_weights", "mixture_schedule")
    if mixture.prefetch_workers == 0:
        idle("prefetch_workers is 0", "prefetch_buffer_size")
    elif mixture.prefetch_buffer_size == 0:
        idle("prefetch_buffer_size is 0", "prefetch_workers")
    if mixture.streaming:
        idle("streaming writes nothing to disk", "cache_dir", "cache_remote_files")
        idle("streaming packs on the fly", "pack_on_the_fly")
    elif mixture.pack_on_the_fly:
        idle("pack_on_the_fly writes nothing to disk", "cache_dir", "cache_remote_files")
    if mixture.streaming or mixture.pack_on_the_fly or not mixture.cache_remote_files:
        idle("no remote file is copied", "cache_expiry_seconds")

    if mixture.save is not None and not mixture.save.push_to_hub:
        for key in ("hub_repo_id", "hub_private"):
            if key in mixture.save.model_fields_set:
                remarks.append((("save", key), f"{key} has no effect: push_to_hub is off"))
    if not any(inform.is_visual for inform in mixture.informs):
        idle("no inform has images", "image_target_field")

    reason = "nothing is saved" if mixture.save is None else "packed rows are saved, not documents"
    if mixture.save is None or mixture.pack_tokens:
        idle(reason, "text_target_field")
        if "output_field" in mixture.tokenization.model_fields_set:
            path = ("tokenization", "output_field")
            remarks.append((path, f"output_field has no effect: {reason}"))
        for i, inform in enumerate(mixture.informs):
            # A column of the schema may read the field; prompt batches contain the fields.
            unread = [name for name in inform.additional_fields if name not in schema.fields]
            if unread and not schema.kind.keeps_fields:
                message = f"{', '.join(unread)}: additional_fields have no effect: {reason}"
                remarks.append((("informs", i, "additional_fields"), message))
    for i, inform in enumerate(mixture.eval_informs):
        if inform.additional_fields and not schema.kind.keeps_fields:
            message = "additional_fields have no effect: evaluation data is not saved"
            remarks.append((("eval_informs", i, "additional_fields"), message))
    return remarks
