"""The options of data: informs (`inform.py`), tokenization, the mixture, saving.

Names and defaults are those of EasyDeL's YAML reference. Importing this module imports pydantic
and nothing heavier, so that a configuration can be checked in a moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ed_data.config.base import Options
from ed_data.config.source import Inform, path_text
from ed_data.errors import KeyPath, did_you_mean

# Bounds catch slips of the pen before they cost memory; each is far above what a run needs.
TokenCount = Annotated[int, Field(gt=0, le=2**24)]
RowCount = Annotated[int, Field(gt=0, le=2**20)]
#: Nothing of this size is held in memory.
Extent = Annotated[int, Field(ge=0, le=2**40)]


def _padding(value: object) -> object:
    if value is True:
        return "longest"
    if value is False or value == "do_not_pad":
        raise ValueError("a batch is a rectangle, so rows are padded: 'max_length' or 'longest'")
    return value


class Tokenization(Options):
    """How a document becomes tokens.

    `max_length` cuts documents. Without it, packing splits a long document over several rows, and
    unpacked rows are cut at the sequence length. `truncation: true` cuts in packing too;
    `truncation: false` splits in both. An end-of-text token ends each document that is not cut. A
    chat has the tokens of the chat template: an end-of-text token follows only an answer that the
    template does not end with an end token.

    `assistant_only_loss` restricts the loss of chats to the answers and their ends. An answer is
    what the chat template puts in `{% generation %}`; without such marks, an answer is what each
    message of the assistant adds to the text.

    `num_proc` processes encode `batch_size` documents each at a time, for chats above all: of plain
    texts, the tokenizer uses every core as it is.
    """

    tokenizer: str | None = None
    """Id or folder; without it the model's."""
    max_length: TokenCount | None = None
    """Tokens at which a document is cut."""
    truncation: bool | None = None
    """Whether documents longer than a row are cut: see above."""
    padding: Annotated[Literal["max_length", "longest"], BeforeValidator(_padding)] = "max_length"
    """To the length of a row, or to the longest of the batch."""
    add_special_tokens: bool = True
    """Let the tokenizer add its own, such as a beginning-of-text marker."""
    return_attention_mask: bool = False
    """Add `attention_mask` to the batch."""
    output_field: str = "input_ids"
    """Name of the tokens in saved documents."""
    batch_size: RowCount = 1000
    """Documents that are encoded together."""
    num_proc: Annotated[int, Field(gt=0, le=256)] | None = None
    """Processes that encode; without it, this one."""
    assistant_only_loss: bool = False
    """Take the loss of chats on the answers alone."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.truncation is False and self.max_length is not None:
            yield ("max_length",), "max_length cuts documents, and truncation: false forbids it"


_COMPRESSIONS = {
    "parquet": ("snappy", "gzip", "zstd", "lz4", "brotli", "none"),
    "arrow": ("zstd", "lz4"),
}


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: object) -> object:
    """A number of bytes of a text such as "500MB"; anything else stays."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)", value.strip().upper())
    if found is None:
        raise ValueError(f"a number of bytes, or a size such as '500MB' or '1GiB', not {value!r}")
    return int(float(found[1]) * _UNITS[found[2]])


class Saving(Options):
    """Where and how to write the processed data (documents, or packed rows when packing).

    `push_to_hub` uploads the folder to the dataset `hub_repo_id` of the Hugging Face hub, which is
    made if it is not there, with the account of `hf auth login` or `HF_TOKEN`.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"output_path": "path"}

    path: Annotated[str, BeforeValidator(path_text)]
    """A folder."""
    format: Literal["parquet", "json", "jsonl", "arrow"] = "parquet"
    """Of the files; `json` has one object a line too."""
    # All shards are open at once, and a process may open about a thousand files.
    num_shards: Annotated[int, Field(gt=0, le=512)] = 1
    """Files; rows are dealt in turn."""
    max_shard_size: Annotated[int | None, BeforeValidator(_bytes)] = None
    """Bytes, or a text such as "500MB"; then a shard follows another, and `num_shards` is 1."""
    compression: str | None = None
    """Of the format: parquet snappy, gzip, zstd, lz4, brotli; arrow zstd, lz4; json gzip,
    bz2, xz."""
    overwrite: bool = False
    """Replace other data in the folder."""
    push_to_hub: bool = False
    """Upload the finished folder."""
    hub_repo_id: str | None = None
    """Dataset on the hub: `organisation/name`."""
    hub_private: bool | None = None
    """Whether a dataset that is made is private."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.max_shard_size is not None and self.num_shards != 1:
            yield ("max_shard_size",), "num_shards says how many there are: keep one of the two"
        if self.push_to_hub and not self.hub_repo_id:
            yield ("hub_repo_id",), "push_to_hub needs it: 'organisation/name' of the dataset"
        if self.push_to_hub and "://" in self.path:
            yield ("path",), f"push_to_hub uploads a folder of this machine, not {self.path!r}"
        known = _COMPRESSIONS.get(self.format, ("gzip", "bz2", "xz"))
        if self.compression is not None and self.compression not in known:
            hint = f"{did_you_mean(self.compression, known)} (known: {', '.join(known)})"
            message = f"format {self.format} has no compression {self.compression!r}{hint}"
            yield ("compression",), message


class MixturePoint(Options):
    """The weights of a mixture from a step on, or at a step."""

    step: Annotated[int, Field(gt=0, le=2**40)]
    """Of the optimizer, from 1."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """By the name of the inform; 0 leaves it out."""


class MixtureSchedule(Options):
    """How `mixture_weights` change over the steps of training.

    `mixture_weights` are the weights at step 0. `step` keeps the weights of a point until the next
    one; `linear` and `cosine` lead from each to the next. Documents are divided anew where a window
    begins (16,384 documents; of a stream, see `streaming`), exactly in each of its blocks.
    """

    type: Literal["step", "linear", "cosine"] = "step"
    """What happens between two points."""
    points: tuple[MixturePoint, ...] = Field(min_length=1)
    """In the order of their steps."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        for i, (before, after) in enumerate(pairwise(self.points)):
            if before.step >= after.step:
                message = f"step {after.step} does not come after {before.step}: put them in order"
                yield ("points", i + 1, "step"), message


def _stop_strategy(value: object) -> object:
    return "all_exhausted" if value == "longest" else value


class Mixture(Options):
    """Informs, and how they are mixed, split, tokenized and packed.

    Without `mixture_weights` an epoch holds each document once. With them, `stop_strategy` says
    how long an epoch is: as many documents as all informs have (`restart`), until the first inform
    has been read (`first_exhausted`), or until all have (`all_exhausted`, also `longest`).
    `mixture_schedule` changes the weights over the steps. `block_mixture` keeps the proportions in
    every block of `mixture_block_size` documents.

    `shuffle_buffer_size` bounds how far a document moves (None: a full permutation; 0 or 1: none).
    `pack_shuffle` orders the packed rows randomly within buffers of
    `pack_shuffle_buffer_factor` batches.

    `pack_on_the_fly` gives the same batches, but tokenizes and packs when a batch needs it: nothing
    is written to disk, and memory is bounded. `streaming` does not even look at the data ahead: for
    what fits neither memory nor disk. Documents are then shuffled and packed in windows of
    `shuffle_buffer_size` (at least 4096) documents, files are read in an order that the seed
    decides, and `stop_strategy: restart` has no epochs.
    """

    informs: tuple[Inform, ...] = Field(min_length=1)
    """The sources of training data."""
    eval_informs: tuple[Inform, ...] = ()
    """Sources of held-out data."""
    eval_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the documents that is held out, by their content."""

    cache_dir: Annotated[str | None, BeforeValidator(path_text)] = None
    """Where tokens, plans and copies of remote files are; without it `$ED_DATA_CACHE`, else
    `~/.cache/ed-data`."""
    cache_remote_files: bool = True
    """Keep a copy of each remote file."""
    cloud_max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Further attempts to read a remote file."""
    cloud_retry_delay: Annotated[float, Field(ge=0.0, le=3600.0)] = 1.0
    """Seconds before the first of them; each waits twice as long as the one before."""
    cache_expiry_seconds: Annotated[float, Field(gt=0.0, le=2**40)] | None = None
    """After so long a copy is fetched again; without it, when the file changes."""
    text_target_field: str = "text"
    """Name of the content in saved documents."""
    image_target_field: str = "image"
    """Name of the image in saved documents, and beside prompts."""

    batch_size: RowCount | None = None
    """Rows of a batch, over all hosts."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Orders the data."""
    shuffle_buffer_size: Extent | None = None
    """Documents that change places with each other: see above."""
    streaming: bool = False
    """Read as training goes on, and nothing ahead: see above."""

    pack_tokens: bool = False
    """Several documents share a row."""
    pack_seq_length: TokenCount | None = None
    """Tokens of a packed row."""
    pack_eos_token_id: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Ends each document, packed or not, but no chat that its template ends; without it, the
    tokenizer's end-of-text."""
    pack_strategy: Literal["bfd", "first_fit", "greedy", "wrapped"] = "bfd"
    """Best-fit decreasing; first fit; row by row in order; or one stream, cut anywhere."""
    pack_shuffle: bool = True
    """Order packed rows randomly."""
    pack_shuffle_buffer_factor: RowCount = 16
    """Batches of rows that change places with each other."""
    pack_on_the_fly: bool = False
    """Tokenize when a batch needs it, and write nothing: see above."""

    block_mixture: bool = True
    """Keep the proportions in every block."""
    mixture_block_size: Annotated[Extent, Field(gt=0)] = 2048
    """Documents of a block."""
    stop_strategy: Annotated[
        Literal["restart", "first_exhausted", "all_exhausted"], BeforeValidator(_stop_strategy)
    ] = "restart"
    """How long an epoch is; `longest` is another name of `all_exhausted`."""
    mixture_weights: dict[str, float] | None = None
    """Share of each inform, by its name."""
    mixture_schedule: MixtureSchedule | None = None

    prefetch_workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Threads that make batches ahead."""
    prefetch_buffer_size: Annotated[int, Field(ge=0, le=4096)] = 4
    """Batches made ahead."""

    tokenization: Tokenization = Tokenization()
    save: Saving | None = None

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        limit, length = self.tokenization.max_length, self.pack_seq_length
        if self.pack_tokens and limit is not None and length is not None and limit > length:
            yield (
                ("tokenization", "max_length"),
                f"{limit} is above pack_seq_length {length}: no row could hold such a document; "
                "lower it, or leave it out to split long documents",
            )
        if self.pack_tokens and self.tokenization.padding == "longest":
            message = "packed rows all have pack_seq_length: padding 'longest' has no place"
            yield ("tokenization", "padding"), message
        if self.streaming and self.save is not None:
            message = "a stream has no end to save; save the mixture without streaming"
            yield ("save",), message
        labels = [inform.label for inform in self.informs]
        for name, weight in (self.mixture_weights or {}).items():
            if name not in labels:
                hint = f"{did_you_mean(name, labels)} (the names are: {', '.join(labels)})"
                yield ("mixture_weights", name), f"no inform is named {name!r}{hint}"
            if weight < 0 or (weight == 0 and self.mixture_schedule is None):
                yield (
                    ("mixture_weights", name),
                    f"the weight of {name!r} is {weight}; a weight is above 0 (leave the inform "
                    "out instead)",
                )
        for i, label in enumerate(labels if self.mixture_weights is not None else ()):
            if label in labels[:i]:
                message = f"two informs are named {label!r}; give each its own name"
                yield ("informs", i, "name"), message
            elif label not in (self.mixture_weights or {}):
                yield ("mixture_weights",), f"inform {label!r} has no weight"
        if self.mixture_schedule is not None:
            yield from self._schedule_problems(self.mixture_schedule, labels)

    def _schedule_problems(
        self, schedule: MixtureSchedule, labels: list[str]
    ) -> Iterator[tuple[KeyPath, str]]:
        if self.mixture_weights is None:
            yield ("mixture_weights",), "mixture_schedule needs them: the weights at step 0"
        elif not sum(self.mixture_weights.values()):
            yield ("mixture_weights",), "every weight is 0: nothing would be read"
        if self.stop_strategy != "restart":
            message = (
                "with a mixture_schedule an epoch is as many documents as there are: leave "
                "stop_strategy out, or write restart"
            )
            yield ("stop_strategy",), message
        for i, point in enumerate(schedule.points):
            path = ("mixture_schedule", "points", i, "weights")
            for name in point.weights:
                if name not in labels:
                    hint = f"{did_you_mean(name, labels)} (the names are: {', '.join(labels)})"
                    yield (*path, name), f"no inform is named {name!r}{hint}"
            for label in labels:
                if label not in point.weights:
                    yield path, f"inform {label!r} has no weight; 0 leaves the inform out"
            if not sum(point.weights.values()):
                yield path, "every weight is 0: nothing would be read"
