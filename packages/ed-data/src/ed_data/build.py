"""`build_loader`: the loader of a mixture, for a tokenizer or a processor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_data.batches.arrays import BatchLayout
from ed_data.batches.loader import EXCLUDED, Loader, StreamLoader, hash_json
from ed_data.checks import check_names, find_unsupported_keys
from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.order import stream
from ed_data.order.options import build_shares, build_weight_schedule, document_order, order_details
from ed_data.order.plan import WINDOW, RowPlan
from ed_data.order.reading import SHARDS, MixedDocuments, Passes
from ed_data.order.stream import StreamPlan
from ed_data.order.windows import RowOptions
from ed_data.rows.documents import Documents
from ed_data.rows.splits import (
    check_split,
    choose_schema,
    default_cache_dir,
    file_cache,
    in_split,
    prefix_error_path,
)
from ed_data.save import save_mixture
from ed_data.schema import TEXT, Schema
from ed_data.sources import open_source
from ed_data.storage.prepare import prepare_tokens
from ed_data.tokens.audio import SpeechProcessor, TimeSteps
from ed_data.tokens.chat_recordings import RecordingLayout
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.images import ModelProcessor
from ed_data.tokens.media import medium_encoders
from ed_data.tokens.parallel import Encoding
from ed_data.tokens.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("ed_data")

#: Increased when the same options produce different batches; older states are then rejected.
ORDER_VERSION = 1
_LONGEST_MULTIPLE = 8  # the length of batches that are padded to their longest row
_DEFAULT_SEED = 42


def build_loader(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str = "train",
    cache_dir: str | None = None,
    shuffle: bool = True,
    schema: Schema = TEXT,
    processor: ModelProcessor | SpeechProcessor | None = None,
    decoder_start_token_id: int | None = None,
    time_steps: TimeSteps | None = None,
    recordings: RecordingLayout | None = None,
    embedding_rows: int | None = None,
) -> Loader | StreamLoader:
    """Tokenize a mixture, or read its tokens from the cache, and return the loader of its batches.

    With `streaming: true` the loader reads only the next window in advance, and the result is a
    `StreamLoader`. With a processor, documents are tokenized on the fly, because images and
    recordings are read when a batch needs them.

    Args:
        mixture: the sources, and how they are mixed, tokenized and packed.
        tokenizer: tokenizer of the model, used unless `mixture.tokenization.tokenizer` is set; by
            default that of the processor.
        batch_size: rows of a batch over all hosts; default `mixture.batch_size`, else 1.
        seq_length: tokens of a row; default `mixture.pack_seq_length` when packing, else
            `mixture.tokenization.max_length`.
        seed: used if `mixture.seed` is not set; default 42.
        split: `"train"` or `"eval"`.
        cache_dir: used if `mixture.cache_dir` is not set.
        shuffle: False keeps the order of training data.
        schema: the columns of a document: one text, or for example `ed_data.schema.PREFERENCE`.
        processor: processor of a vision-language model (`AutoProcessor`). Batches then contain
            `pixel_values` [b, i, c, h, w]. Schemas with recordings require the processor of a model
            of speech; see `ed_data.tokens.audio.AudioEncoder.arrays`.
        decoder_start_token_id: first decoder token of an encoder-decoder model, required by
            `ed_data.schema.SEQ2SEQ` and `ed_data.schema.SPEECH_SEQ2SEQ`.
        time_steps: convolutions of a CTC model. A row with more labels than time steps is then
            an error.
        recordings: the recordings that an audio-language model reads. Chats may then contain
            recordings, and batches contain `input_features` [b, i, m, f].
        embedding_rows: number of rows of the model's embedding. A document with a larger id is
            then an error; a padding token without a row is replaced by the end-of-text token.

    Raises:
        DataError: a name cannot be resolved, data is missing or empty, or options contradict each
            other.
    """
    folder = mixture.cache_dir or cache_dir or default_cache_dir()
    schema = choose_schema(mixture, schema, file_cache(mixture, folder))
    length = _seq_length(mixture, seq_length) if schema.kind.has_text else 1
    kind = None if processor is None else "images" if recordings is None else "recordings"
    limit = _document_limit(mixture, length, schema, kind)
    _check_kind(mixture, schema, decoder_start_token_id, time_steps)
    media, audio = medium_encoders(
        mixture,
        schema,
        processor,
        start=decoder_start_token_id,
        steps=time_steps,
        recordings=recordings,
    )
    for path, message in check_names(mixture, schema):  # before slow work starts
        raise DataError(message, path)
    if processor is not None:
        if schema.kind.has_text:
            tokenizer = processor.tokenizer if tokenizer is None else tokenizer
        if not mixture.streaming:
            mixture = mixture.replace(pack_on_the_fly=True)
    rows = batch_size or mixture.batch_size or 1
    seed = mixture.seed if mixture.seed is not None else _DEFAULT_SEED if seed is None else seed
    tokenizer = load_tokenizer(mixture, tokenizer) if schema.kind.has_text else None
    encoder = Encoder.create(
        tokenizer,
        mixture.tokenization,
        mixture.pack_eos_token_id,
        schema,
        media,
        limit,
        audio,
        embedding_rows,
    )
    shuffle = shuffle and split == "train"
    shuffle_rows = None
    if shuffle and mixture.pack_tokens and mixture.pack_shuffle:
        shuffle_rows = rows * mixture.pack_shuffle_buffer_factor
    options = RowOptions(
        batch_size=rows,
        seq_length=length,
        strategy=mixture.pack_strategy if mixture.pack_tokens else None,
        max_length=limit,
        shuffle_rows=shuffle_rows,
        seed=seed,
        endless=split == "train",
        cut=mixture.tokenization.cut or "right",
    )
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if isinstance(pad, int) and embedding_rows is not None and pad >= embedding_rows:
        log.info("the padding token %d has no row in the embedding: rows are padded otherwise", pad)
        pad = None
    layout = BatchLayout(
        batch_size=rows,
        seq_length=length,
        pad_id=pad if isinstance(pad, int) else encoder.eos,
        columns=tuple(column.name for column in schema.columns),
        values=schema.values,
        width_multiple=_LONGEST_MULTIPLE if mixture.tokenization.padding == "longest" else None,
        attention_mask=mixture.tokenization.return_attention_mask,
        kind=schema.kind,
        decoder_start_token_id=decoder_start_token_id,
        media=media,
        audio=audio,
    )
    if mixture.streaming:
        return _stream(mixture, encoder, options, layout, split, shuffle, folder)
    loader = _build_indexed_loader(mixture, encoder, options, layout, split, shuffle, folder)
    if mixture.save is not None and split == "train" and tokenizer is not None:
        save_mixture(mixture, tokenizer, loader=loader, cache_dir=folder, schema=schema)
    return loader


def _build_indexed_loader(
    mixture: Mixture,
    encoder: Encoder,
    options: RowOptions,
    layout: BatchLayout,
    split: str,
    shuffle: bool,
    folder: str,
) -> Loader:
    encoding = Encoding(encoder, mixture.tokenization.num_proc)
    try:
        # Saving reads all tokens, and the number of windows is known at the end of a source, so
        # both wait for the stores.
        windows = any(column.stride is not None for column in encoder.schema.columns)
        wait = mixture.save is not None or windows
        parts = prepare_tokens(mixture, encoding, split, folder, wait=wait)
    except BaseException:
        encoding.close()
        raise
    encoding.rest()
    labels, sizes = [part.label for part in parts], [len(part.members) for part in parts]
    order = document_order(mixture, labels, sizes, split, options.seed, shuffle)
    by_step = build_weight_schedule(mixture, labels, split) is not None
    own_details = {
        **_order_details(mixture, options, layout, split, shuffle),
        "window": WINDOW,
        # With a schedule, the drawn documents depend on the rows.
        "documents_per_epoch": sizes if by_step else order.documents_per_epoch(),
    }
    data_details = {
        "split": split,
        "eval_fraction": mixture.eval_fraction,
        "sources": {f"{i}:{part.label}": part.tokens.digest for i, part in enumerate(parts)},
    }
    details = {
        "data": data_details,
        "tokenizer": encoder.fingerprint,
        "order": own_details,
        "batch_size": options.batch_size,
    }
    if mixture.exclude is not None and split == "train":
        from ed_data.rows.exclusion import read_hashes  # read by runs with the key only

        details[EXCLUDED] = [f"{int(one):016x}" for one in read_hashes(mixture.exclude)]
    index = None
    # A schedule counts steps, so the plan depends on the batch size.
    plan_details = {**own_details, "batch_size": options.batch_size} if by_step else own_details
    if not mixture.pack_on_the_fly:
        index = Path(folder) / "plans" / hash_json({"data": data_details, "order": plan_details})
    plan = RowPlan(order, parts, options, index)
    if encoder.has_loss_mask:
        plan.check_labels()
    plan.report_cuts(logging.WARNING if encoder.has_loss_mask else logging.INFO)
    return Loader(
        plan,
        layout,
        details,
        workers=mixture.prefetch_workers,
        depth=mixture.prefetch_buffer_size,
        on_close=encoding.close,
    )


def _stream(
    mixture: Mixture,
    encoder: Encoder,
    options: RowOptions,
    layout: BatchLayout,
    split: str,
    shuffle: bool,
    folder: str,
) -> StreamLoader:
    check_split(mixture, split)
    fraction, files = mixture.eval_fraction, file_cache(mixture, folder)
    held_out = split == "eval"
    keys = [("informs", i) for i in range(len(mixture.informs)) if not held_out or fraction]
    keys += [("eval_informs", i) for i in range(len(mixture.eval_informs)) if held_out]
    moves = shuffle and (mixture.shuffle_buffer_size is None or mixture.shuffle_buffer_size > 1)
    passes, outlines = list[Passes](), dict[str, object]()
    for number, (key, place) in enumerate(keys):
        with prefix_error_path(key, place):
            inform: Inform = getattr(mixture, key)[place]
            source = open_source(inform, files)
            documents = Documents(inform, source, encoder.schema, media=mixture.media)
            keep = in_split(split, fraction if key == "informs" else None)
            seeds = (SHARDS, options.seed, number) if moves else None
            passes.append(Passes(documents, keep, seeds, required=not held_out))
            outlines[f"{number}:{inform.label}"] = documents.outline()
    shares = build_shares(mixture, [source_passes.label for source_passes in passes], split)
    mixed = MixedDocuments(passes, shares, mixture.stop_strategy, options.seed, shuffle)
    plan = StreamPlan(
        mixed,
        Encoding(encoder, mixture.tokenization.num_proc),
        options,
        mixture.shuffle_buffer_size if shuffle else 0,
        ahead=mixture.prefetch_workers > 0 and mixture.prefetch_buffer_size > 0,
    )
    details = {
        "data": {"split": split, "eval_fraction": fraction, "sources": outlines},
        "tokenizer": encoder.fingerprint,
        "order": {
            **_order_details(mixture, options, layout, split, shuffle),
            "streaming": True,
            "window": [stream.WINDOW_DOCUMENTS, stream.WINDOW_TOKENS],
        },
        "batch_size": options.batch_size,
    }
    return StreamLoader(plan, layout, details, split)


def _order_details(
    mixture: Mixture, options: RowOptions, layout: BatchLayout, split: str, shuffle: bool
) -> dict[str, Any]:
    start = layout.decoder_start_token_id
    return {
        **({} if start is None else {"decoder_start_token_id": start}),
        "version": ORDER_VERSION,
        **order_details(mixture, split, options.seed, shuffle),
        "pack_strategy": options.strategy,
        "max_length": options.max_length,
        **({} if options.cut == "right" else {"cut": options.cut}),
        "pack_shuffle": options.shuffle_rows,
        "seq_length": options.seq_length,
    }


def _check_kind(
    mixture: Mixture,
    schema: Schema,
    decoder_start_token_id: int | None,
    time_steps: TimeSteps | None,
) -> None:
    for path, message in find_unsupported_keys(mixture, schema):
        raise DataError(message, path)
    if time_steps is not None and not schema.kind.has_time_steps:
        raise DataError(f"time_steps requires a schema of task ctc, got {schema.task}")
    if schema.kind.has_decoder != (decoder_start_token_id is not None):
        raise DataError(
            "a schema of an encoder-decoder requires decoder_start_token_id, and other schemas do "
            f"not use it: got the task {schema.task} and decoder_start_token_id="
            f"{decoder_start_token_id}"
        )


def _seq_length(mixture: Mixture, seq_length: int | None) -> int:
    limit = mixture.tokenization.max_length
    pack_length = mixture.pack_seq_length if mixture.pack_tokens else None
    if pack_length is not None and seq_length is not None and pack_length != seq_length:
        raise DataError(
            f"seq_length={seq_length} contradicts mixture.pack_seq_length={pack_length}: set one "
            "of them",
            ("pack_seq_length",),
        )
    length = pack_length or seq_length or limit
    if length is None:
        path = ("pack_seq_length",) if mixture.pack_tokens else ("tokenization", "max_length")
        key = "mixture.pack_seq_length" if mixture.pack_tokens else "tokenization.max_length"
        raise DataError(f"the sequence length is not set: set {key}, or pass seq_length", path)
    if limit is not None and limit > length:
        raise DataError(
            f"tokenization.max_length={limit} exceeds the sequence length {length}: a document "
            "must fit in a row",
            ("tokenization", "max_length"),
        )
    return int(length)


def _document_limit(
    mixture: Mixture, seq_length: int, schema: Schema, media: str | None
) -> int | None:
    """Return the number of tokens at which documents are truncated; None splits them over rows."""
    options = mixture.tokenization
    is_indivisible = len(schema.columns) > 1 or bool(schema.values) or media is not None
    kind = media or f"{len(schema.columns)} columns"
    kind = "values" if schema.values and len(schema.columns) == 1 else kind
    if is_indivisible and options.cut == "left":
        raise DataError(
            f"documents with {kind} begin with a prompt and cannot lose their beginning: use "
            "truncation: right or drop",
            ("tokenization", "truncation"),
        )
    if is_indivisible and options.cut == "split":
        raise DataError(
            f"documents with {kind} are never split over rows: remove truncation: false",
            ("tokenization", "truncation"),
        )
    if is_indivisible and mixture.pack_tokens and mixture.pack_strategy == "wrapped":
        raise DataError(
            f"pack_strategy 'wrapped' splits documents at any token, but documents with {kind} are "
            "never split: use 'bfd', 'first_fit' or 'greedy'",
            ("pack_strategy",),
        )
    if options.max_length is not None:
        return options.max_length
    if options.cut is None:
        return seq_length if is_indivisible or not mixture.pack_tokens else None
    return None if options.cut == "split" else seq_length
