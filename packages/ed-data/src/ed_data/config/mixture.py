"""The options of a mixture of sources, of tokenization and of saving."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ed_data.config.base import DataOptions
from ed_data.config.media import Media
from ed_data.config.source import Inform, path_text
from ed_data.errors import KeyPath, did_you_mean
from ed_data.languages import language_code

# The bounds are far above realistic values; they catch typing errors before memory is allocated.
TokenCount = Annotated[int, Field(gt=0, le=2**24)]
RowCount = Annotated[int, Field(gt=0, le=2**20)]
#: A number without influence on the size of arrays.
Extent = Annotated[int, Field(ge=0, le=2**40)]


def _padding(value: object) -> object:
    if value is True:
        return "longest"
    if value is False or value == "do_not_pad":
        raise ValueError("the rows of a batch must be padded: use 'max_length' or 'longest'")
    return value


class Tokenization(DataOptions):
    """How documents are tokenized.

    `max_length` truncates documents. Without `max_length`, packing splits a long document over
    several rows, and documents that are not packed are truncated at the sequence length.
    `truncation: right` (or true) also truncates in packing; `split` (or false) splits in both
    cases; `left` removes the beginning of longer documents, and `drop` omits them. The log counts
    the longer documents, and those whose answers are removed completely. An end-of-text token ends
    each document that is not truncated. A chat has the tokens of the chat template: an end-of-text
    token follows only an answer that the template does not end with an end token.

    `assistant_only_loss` restricts the loss of chats to the answers and their end tokens. An answer
    is the text in `{% generation %}` of the chat template; without such marks, it is the text that
    a message of the assistant adds.

    Each of `num_proc` processes encodes `batch_size` documents at a time. Processes are useful for
    chats; for plain texts the tokenizer already uses all cores.
    """

    tokenizer: str | None = None
    """Id or folder of the tokenizer; default: the tokenizer of the model."""
    max_length: TokenCount | None = None
    """Number of tokens at which a document is truncated."""
    truncation: bool | Literal["drop", "left", "right", "split"] | None = None
    """What happens to documents that are longer than a row, see above."""
    padding: Annotated[Literal["max_length", "longest"], BeforeValidator(_padding)] = "max_length"
    """Pad to the sequence length, or to the longest row of the batch."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as a beginning-of-text token."""
    return_attention_mask: bool = False
    """Whether batches contain `attention_mask`."""
    output_field: str = "input_ids"
    """Name of the field with tokens in saved documents."""
    batch_size: RowCount = 1000
    """Number of documents that are encoded together."""
    language: Annotated[str, AfterValidator(language_code)] | None = None
    """Language of transcripts, for tokenizers with tokens of languages (Whisper): a code such as
    `de`, or an English name; default: the setting of the tokenizer."""
    task: Literal["transcribe", "translate"] | None = None
    """Whether texts of recordings are transcripts, or translations to English (Whisper)."""
    num_proc: Annotated[int, Field(gt=0, le=256)] | None = None
    """Number of worker processes for encoding; default: no worker processes."""
    assistant_only_loss: bool = False
    """Whether the loss of chats is restricted to the answers."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.cut == "split" and self.max_length is not None:
            yield (
                ("max_length",),
                "max_length truncates documents, but truncation: false disables truncation",
            )

    @property
    def cut(self) -> Literal["drop", "left", "right", "split"] | None:
        """What happens to longer documents; None = packing splits, and other rows are truncated."""
        if isinstance(self.truncation, bool):
            return "right" if self.truncation else "split"
        return self.truncation


_COMPRESSIONS = {
    "parquet": ("snappy", "gzip", "zstd", "lz4", "brotli", "none"),
    "arrow": ("zstd", "lz4"),
}


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: object) -> object:
    """Return the number of bytes of a text such as "500MB", and other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)", value.strip().upper())
    if match is None:
        raise ValueError(
            f"must be a number of bytes, or a size such as '500MB' or '1GiB', got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


class Saving(DataOptions):
    """Location and format of saved data: documents, or packed rows with `pack_tokens`.

    `push_to_hub` uploads the folder to the dataset `hub_repo_id` of the Hugging Face hub, with the
    account of `hf auth login` or `HF_TOKEN`. The dataset is created if it does not exist.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"output_path": "path"}

    path: Annotated[str, BeforeValidator(path_text)]
    """Folder of the files."""
    format: Literal["parquet", "json", "jsonl", "arrow"] = "parquet"
    """File format; `json` and `jsonl` contain one object per line."""
    # All shards are open at the same time, and a process may open about a thousand files.
    num_shards: Annotated[int, Field(gt=0, le=512)] = 1
    """Number of files; rows are distributed over them in turn."""
    max_shard_size: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_bytes)] = None
    """Maximum size of a file in bytes, or as text such as "500MB"; requires `num_shards: 1`."""
    compression: str | None = None
    """Compression: for parquet snappy, gzip, zstd, lz4, brotli; for arrow zstd, lz4; for json gzip,
    bz2, xz."""
    overwrite: bool = False
    """Whether other data in the folder is replaced."""
    push_to_hub: bool = False
    """Whether the complete folder is uploaded."""
    hub_repo_id: str | None = None
    """Id of the dataset on the hub: `organization/name`."""
    hub_private: bool | None = None
    """Whether a newly created dataset is private."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.max_shard_size is not None and self.num_shards != 1:
            yield (
                ("max_shard_size",),
                "max_shard_size and num_shards exclude each other: remove one of them",
            )
        if self.push_to_hub and not self.hub_repo_id:
            yield (
                ("hub_repo_id",),
                "push_to_hub requires the id of the dataset: 'organization/name'",
            )
        if self.push_to_hub and "://" in self.path:
            yield ("path",), f"push_to_hub requires a local folder, got {self.path!r}"
        compressions = _COMPRESSIONS.get(self.format, ("gzip", "bz2", "xz"))
        if self.compression is not None and self.compression not in compressions:
            hint = (
                f"{did_you_mean(self.compression, compressions)} (known: {', '.join(compressions)})"
            )
            message = f"format {self.format} has no compression {self.compression!r}{hint}"
            yield ("compression",), message


class MixturePoint(DataOptions):
    """The weights of a mixture at a training step."""

    step: Annotated[int, Field(gt=0, le=2**40)]
    """Optimizer step, at least 1."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight of each inform, by name; 0 excludes the inform."""


class MixtureSchedule(DataOptions):
    """How `mixture_weights` change over the training steps.

    `mixture_weights` are the weights at step 0. `step` keeps the weights of a point until the next
    point; `linear` and `cosine` interpolate between points. The weights are updated at the
    beginning of each window (16,384 documents; for streams, see `streaming`), and are exact in each
    block.
    """

    type: Literal["step", "linear", "cosine"] = "step"
    """Interpolation between two points."""
    points: tuple[MixturePoint, ...] = Field(min_length=1)
    """Points in the order of their steps."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        for i, (point, next_point) in enumerate(pairwise(self.points)):
            if point.step >= next_point.step:
                message = (
                    f"step {next_point.step} must be greater than {point.step}: sort the points"
                )
                yield ("points", i + 1, "step"), message


def _stop_strategy(value: object) -> object:
    return "all_exhausted" if value == "longest" else value


class Mixture(DataOptions):
    """Informs, and how they are mixed, split, tokenized and packed.

    Without `mixture_weights`, an epoch contains each document once. With `mixture_weights`,
    `stop_strategy` determines the length of an epoch: the number of documents of all informs
    (`restart`), the documents until the first inform has been read completely (`first_exhausted`),
    or until all informs have been read (`all_exhausted`, alias `longest`). `mixture_schedule`
    changes the weights over the steps. With `block_mixture`, the proportions are exact in each
    block of `mixture_block_size` documents.

    `shuffle_buffer_size` is the number of documents that are shuffled together (None: all; 0 or 1:
    no shuffling). `pack_shuffle` shuffles packed rows within buffers of
    `pack_shuffle_buffer_factor` batches.

    `pack_on_the_fly` creates the same batches, but tokenizes and packs documents when a batch needs
    them, with bounded memory and without writing to disk. `streaming` reads the data only once, for
    data that fits neither in memory nor on disk. It shuffles and packs documents in windows of
    `shuffle_buffer_size` (at least 4096) documents, the seed determines the order of the files, and
    `stop_strategy: restart` has no epochs.
    """

    informs: tuple[Inform, ...] = Field(min_length=1)
    """Sources of training data."""
    eval_informs: tuple[Inform, ...] = ()
    """Sources of evaluation data."""
    eval_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the documents that is held out for evaluation, selected by content."""
    exclude: Annotated[str | None, BeforeValidator(path_text)] = None
    """JSON file with the hashes of documents that no batch contains; every other document keeps
    its place."""

    cache_dir: Annotated[str | None, BeforeValidator(path_text)] = None
    """Folder of tokens, plans and copies of remote files; default: `$ED_DATA_CACHE`, else
    `~/.cache/ed-data`."""
    cache_remote_files: bool = True
    """Whether copies of remote files are stored."""
    cloud_max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Number of additional attempts to read a remote file."""
    cloud_retry_delay: Annotated[float, Field(ge=0.0, le=3600.0)] = 1.0
    """Seconds before the first additional attempt; the delay doubles with each attempt."""
    cache_expiry_seconds: Annotated[float, Field(gt=0.0, le=2**40)] | None = None
    """Seconds after which a copy is downloaded again; default: when the file changes."""
    text_target_field: str = "text"
    """Name of the field with the content in saved documents."""
    image_target_field: str = "image"
    """Name of the field with the image in saved documents and prompt batches."""

    batch_size: RowCount | None = None
    """Number of rows of a batch over all hosts."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Seed of the order of the data."""
    shuffle_buffer_size: Extent | None = None
    """Number of documents that are shuffled together, see above."""
    streaming: bool = False
    """Whether data is read sequentially during training, see above."""

    pack_tokens: bool = False
    """Whether a row contains several documents."""
    pack_seq_length: TokenCount | None = None
    """Number of tokens of a packed row."""
    pack_eos_token_id: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Token that ends each document, except chats that their template ends; default: the
    end-of-text token of the tokenizer."""
    pack_strategy: Literal["bfd", "first_fit", "greedy", "wrapped"] = "bfd"
    """Best-fit decreasing; first fit; row by row in order; or split at any token."""
    pack_shuffle: bool = True
    """Whether packed rows are shuffled."""
    pack_shuffle_buffer_factor: RowCount = 16
    """Number of batches whose rows are shuffled together."""
    pack_on_the_fly: bool = False
    """Whether documents are tokenized when a batch needs them, see above."""

    block_mixture: bool = True
    """Whether proportions are exact in each block."""
    mixture_block_size: Annotated[Extent, Field(gt=0)] = 2048
    """Number of documents of a block."""
    stop_strategy: Annotated[
        Literal["restart", "first_exhausted", "all_exhausted"], BeforeValidator(_stop_strategy)
    ] = "restart"
    """Length of an epoch, see above; `longest` is an alias of `all_exhausted`."""
    mixture_weights: dict[str, float] | None = None
    """Share of each inform, by name; see `weights`."""
    mixture_schedule: MixtureSchedule | None = None

    prefetch_workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Number of threads that prefetch batches."""
    prefetch_buffer_size: Annotated[int, Field(ge=0, le=4096)] = 4
    """Number of prefetched batches."""

    media: Media = Media()
    """Hosts, stores and folders whose images and recordings rows may name."""
    tokenization: Tokenization = Tokenization()
    save: Saving | None = None

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        limit, length = self.tokenization.max_length, self.pack_seq_length
        if self.pack_tokens and limit is not None and length is not None and limit > length:
            yield (
                ("tokenization", "max_length"),
                f"{limit} exceeds pack_seq_length={length}: a document must fit in a row; decrease "
                "max_length, or remove it to split long documents",
            )
        if self.pack_tokens and self.tokenization.padding == "longest":
            message = (
                "padding 'longest' requires pack_tokens: false, because packed rows have one length"
            )
            yield ("tokenization", "padding"), message
        if self.streaming and self.save is not None:
            message = "a stream cannot be saved; save the mixture without streaming"
            yield ("save",), message
        if self.exclude is not None:
            yield from self._exclusion_problems()
        labels = [inform.label for inform in self.informs]
        weights = self.weights
        for name, weight in (self.mixture_weights or {}).items():
            if weights is not None and name not in labels:
                hint = f"{did_you_mean(name, labels)} (known: {', '.join(labels)})"
                yield ("mixture_weights", name), f"there is no inform {name!r}{hint}"
            if weight < 0 or (weight == 0 and self.mixture_schedule is None):
                yield (
                    ("mixture_weights", name),
                    f"the weight of {name!r} is {weight}; it must be greater than 0 (remove the "
                    "inform to exclude it)",
                )
        for i, label in enumerate(labels if weights is not None else ()):
            if label in labels[:i]:
                message = f"two informs have the name {label!r}; set different names"
                yield ("informs", i, "name"), message
            elif label not in (self.mixture_weights or {}):
                yield ("mixture_weights",), f"inform {label!r} has no weight"
        if self.mixture_schedule is not None:
            yield from self._schedule_problems(self.mixture_schedule, labels)

    def _exclusion_problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.streaming:
            message = (
                "a stream does not know its documents in advance, so none can be excluded: set "
                "streaming: false, or drop the rows with format_callback, which moves the others"
            )
            yield ("exclude",), message
        if self.save is not None:
            message = "saved data would contain the excluded documents: omit save, or exclude"
            yield ("save",), message

    @property
    def weights(self) -> dict[str, float] | None:
        """`mixture_weights`, or None if they belong to no inform.

        The weights belong to no inform if no inform has a `name`, and no weight has a name that an
        inform has or nearly has. `ed_data.checks.idle_options` warns about them.
        """
        weights = self.mixture_weights
        if (
            weights is None
            or self.mixture_schedule is not None
            or any(i.name for i in self.informs)
        ):
            return weights
        labels = [inform.label for inform in self.informs]
        close_matches = (
            difflib.get_close_matches(name, labels, n=1, cutoff=0.75) for name in weights
        )
        return weights if any(close_matches) else None

    def _schedule_problems(
        self, schedule: MixtureSchedule, labels: list[str]
    ) -> Iterator[tuple[KeyPath, str]]:
        if self.mixture_weights is None:
            yield (
                ("mixture_weights",),
                "mixture_schedule requires mixture_weights, the weights at step 0",
            )
        elif not sum(self.mixture_weights.values()):
            yield ("mixture_weights",), "every weight is 0: at least one must be greater than 0"
        if self.stop_strategy != "restart":
            message = (
                "a mixture_schedule requires stop_strategy restart: remove stop_strategy, or set "
                "it to restart"
            )
            yield ("stop_strategy",), message
        for i, point in enumerate(schedule.points):
            path = ("mixture_schedule", "points", i, "weights")
            for name in point.weights:
                if name not in labels:
                    hint = f"{did_you_mean(name, labels)} (known: {', '.join(labels)})"
                    yield (*path, name), f"there is no inform {name!r}{hint}"
            for label in labels:
                if label not in point.weights:
                    yield path, f"inform {label!r} has no weight; set 0 to exclude the inform"
            if not sum(point.weights.values()):
                yield path, "every weight is 0: at least one must be greater than 0"
