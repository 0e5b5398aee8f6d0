"""`data_report`: the contents of a mixture before training, as text and as a page.

The report contains the rows, dropped rows, tokens, document lengths, fill ratio, truncation, the
actual shares of the informs, duplicates, and the first rows as the trainer receives them.
`near_duplicates` finds similar documents by MinHash over five consecutive tokens (Broder 1997).
"""

from __future__ import annotations

import contextlib
import html
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ed_data.batches.loader import Loader
from ed_data.build import build_loader
from ed_data.config import Mixture
from ed_data.rows.splits import choose_schema, default_cache_dir, file_cache
from ed_data.schema import TEXT, Schema
from ed_data.storage.prepare import prepare_tokens
from ed_data.storage.store import StorePart
from ed_data.tokens.audio import SpeechProcessor, TimeSteps
from ed_data.tokens.chat_recordings import RecordingLayout
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.images import ModelProcessor
from ed_data.tokens.media import medium_encoders
from ed_data.tokens.parallel import Encoding
from ed_data.tokens.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Number of rows of each inform that are read from a streamed mixture.
STREAMED_ROWS = 10_000
_BAR = 40  # length of the longest bar in characters
_SHOWN = 600  # tokens of a sample
_SOURCE: str = "inform|rows|documents|tokens|an epoch|share|weight|left out|duplicates|nearly"
_LOSS, _NO_LOSS, _PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[0m"


@dataclass(frozen=True)
class SourceReport:
    """One inform.

    Attributes:
        name: name of the inform.
        rows: number of rows that were read; 0 if an older cache does not contain the number.
        documents: number of documents of the split.
        tokens: number of their tokens (with several columns, of the longest).
        per_epoch: number of documents of the inform in an epoch.
        share: share of the documents of an epoch.
        weight: share according to `mixture_weights`; None without weights.
        dropped: number of dropped rows by reason.
        examples: the first dropped row for each reason.
        duplicates: number of documents whose content occurs earlier, in this inform or another.
        near_duplicates: number of near-duplicates of earlier documents of the inform; None if they
            were not searched.
    """

    name: str
    rows: int
    documents: int
    tokens: int
    per_epoch: int
    share: float
    weight: float | None
    dropped: dict[str, int]
    examples: dict[str, str]
    duplicates: int
    near_duplicates: int | None


#: Pieces of a row in order: the text, and whether it has loss.
Sample = list[tuple[str, bool]]


@dataclass(frozen=True)
class Report:
    """Statistics of a mixture; `str` formats them for a terminal, `html` as a page.

    Attributes:
        sources: statistics of the informs.
        stats: statistics of the loader, see `RowPlan.stats`.
        histogram: upper bounds of document lengths, and the number of documents up to each bound
            and above the previous bound.
        over_length: number of documents longer than a row.
        learned: share of the tokens of the first batch that have loss.
        samples: the first rows.
    """

    sources: list[SourceReport]
    stats: dict[str, Any]
    histogram: list[tuple[int, int]]
    over_length: int
    learned: float
    samples: list[Sample]

    def __str__(self) -> str:
        return self.text()

    def text(self, colour: bool = False) -> str:
        """Return the report for a terminal; with color, text with loss is green."""
        lines = []
        for title, rows in self._tables():
            lines += [title, *_columns(rows), ""]
        top = max((count for _, count in self.histogram), default=0)
        lines.append("length of the documents, in tokens")
        for bound, count in self.histogram:
            bar = "█" * round(_BAR * count / max(top, 1))
            lines.append(f"  ≤ {bound:>7,} {bar:<{_BAR}} {count:,}")
        for number, sample in enumerate(self.samples):
            lines += ["", f"row {number}, as the trainer sees it" + self._legend(colour)]
            lines.append("".join(_mark_text(text, loss, colour) for text, loss in sample))
        return "\n".join(lines)

    def html(self) -> str:
        """Return the report as a self-contained HTML page."""
        parts = [_HEAD]
        for title, rows in self._tables():
            head, *body = rows
            parts.append(f"<h2>{html.escape(title)}</h2><table><tr>")
            parts += [f"<th>{html.escape(cell)}</th>" for cell in head]
            for row in body:
                cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
                parts.append(f"</tr><tr>{cells}")
            parts.append("</tr></table>")
        top = max((count for _, count in self.histogram), default=0) or 1
        parts.append("<h2>length of the documents, in tokens</h2><table>")
        for bound, count in self.histogram:
            bar = f'<div class="bar" style="width:{100 * count / top:.1f}%"></div>'
            parts.append(f'<tr><td>≤ {bound:,}</td><td class="wide">{bar}</td><td>{count:,}</td>')
        parts.append("</table>")
        for number, sample in enumerate(self.samples):
            parts.append(f"<h2>row {number}, as the trainer sees it</h2><pre>")
            for text, loss in sample:
                kind = "loss" if loss else "rest"
                parts.append(f'<span class="{kind}">{html.escape(text)}</span>')
            parts.append("</pre>")
        return "\n".join(parts)

    def _tables(self) -> list[tuple[str, list[list[str]]]]:
        stats = self.stats
        epoch_table = [
            ["documents", "tokens", "rows", "fill", "steps an epoch", "longer than a row", "cut"],
            [
                f"{stats['documents']:,}",
                f"{stats['tokens']:,}",
                f"{stats['rows']:,}",
                f"{stats['fill']:.2%}",
                f"{stats['steps_per_epoch']:,}",
                f"{self.over_length:,}",
                f"{stats['tokens_cut']:,} tokens",
            ],
        ]
        sources: list[list[str]] = [_SOURCE.split("|")]
        dropped: list[list[str]] = [["inform", "rows", "why", "the first"]]
        for s in self.sources:
            weight = "–" if s.weight is None else f"{s.weight:.2%}"
            near_count = "–" if s.near_duplicates is None else f"{s.near_duplicates:,}"
            counts = [f"{n:,}" for n in (s.rows, s.documents, s.tokens, s.per_epoch)]
            left_out = f"{sum(s.dropped.values()):,}"
            shares = [f"{s.share:.2%}", weight]
            sources.append([s.name, *counts, *shares, left_out, f"{s.duplicates:,}", near_count])
            dropped += [
                [s.name, f"{n:,}", reason, s.examples[reason]] for reason, n in s.dropped.items()
            ]
        tables = [("an epoch", epoch_table), ("informs", sources)]
        return tables if len(dropped) == 1 else [*tables, ("rows that were left out", dropped)]

    def _legend(self, colour: bool) -> str:
        share = f"{self.learned:.1%} of the tokens of the first batch have loss"
        return f" (green has loss; {share})" if colour else f" (⟦…⟧ has no loss; {share})"


def data_report(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    cache_dir: str | None = None,
    schema: Schema = TEXT,
    processor: ModelProcessor | SpeechProcessor | None = None,
    decoder_start_token_id: int | None = None,
    time_steps: TimeSteps | None = None,
    recordings: RecordingLayout | None = None,
    embedding_rows: int | None = None,
    with_near_duplicates: bool = False,
    samples: int = 3,
) -> Report:
    """Read a mixture like a training run, and return a report of its contents.

    The tokens are written to the cache that training reads. From a streamed mixture, the first
    `STREAMED_ROWS` rows of each inform are read, and nothing is written.

    Args:
        mixture: the training data.
        tokenizer: see `build_loader`, as for the arguments up to `decoder_start_token_id`.
        batch_size: see `build_loader`.
        seq_length: see `build_loader`.
        seed: see `build_loader`.
        cache_dir: see `build_loader`.
        schema: see `build_loader`.
        processor: see `build_loader`.
        decoder_start_token_id: see `build_loader`.
        time_steps: see `build_loader`.
        recordings: see `build_loader`.
        embedding_rows: see `build_loader`.
        with_near_duplicates: search near-duplicates (MinHash), which is slower.
        samples: number of rows in the report.

    Raises:
        DataError: see `build_loader`.
    """
    mixture = mixture.replace(save=None, prefetch_workers=0)
    if mixture.streaming:
        informs = [
            inform.replace(num_rows=min(inform.num_rows or STREAMED_ROWS, STREAMED_ROWS))
            for inform in mixture.informs
        ]
        mixture = mixture.replace(informs=informs, streaming=False, pack_on_the_fly=True)
    folder = mixture.cache_dir or cache_dir or default_cache_dir()
    schema = choose_schema(mixture, schema, file_cache(mixture, folder))
    media, audio = medium_encoders(
        mixture,
        schema,
        processor,
        start=decoder_start_token_id,
        steps=time_steps,
        recordings=recordings,
    )
    if processor is not None:
        tokenizer = processor.tokenizer if tokenizer is None else tokenizer
        mixture = mixture.replace(pack_on_the_fly=True)
    tokenizer = load_tokenizer(mixture, tokenizer)
    encoder = Encoder.create(
        tokenizer,
        mixture.tokenization,
        mixture.pack_eos_token_id,
        schema,
        media,
        None,
        audio,
        embedding_rows,
    )
    encoding = Encoding(encoder, mixture.tokenization.num_proc)
    with contextlib.closing(encoding):
        parts = prepare_tokens(mixture, encoding, "train", folder)
    loader = build_loader(
        mixture,
        tokenizer,
        batch_size=batch_size,
        seq_length=seq_length,
        seed=seed,
        cache_dir=cache_dir,
        schema=schema,
        processor=processor,
        decoder_start_token_id=decoder_start_token_id,
        time_steps=time_steps,
        recordings=recordings,
        embedding_rows=embedding_rows,
    )
    assert isinstance(loader, Loader)
    lengths = [part.tokens.lengths(part.members) for part in parts]
    everything = np.concatenate(lengths)
    prefix = f"{schema.columns[0].name}_" if schema.columns[0].name else ""
    batch = loader.batch_at(0)
    if schema.kind.has_audio or schema.kind.has_decoder:  # the decoder has the loss
        labels = batch["labels"]
        used, ids = labels >= 0, np.where(labels < 0, 0, labels)
    else:
        used = batch[f"{prefix}segment_ids"] > 0
        ids, labels = batch[f"{prefix}input_ids"], batch[f"{prefix}labels"]
    if labels.ndim == 1:  # one for each row
        labels = np.full_like(ids, -1)
    has_loss = labels >= 0
    return Report(
        _sources(mixture, parts, lengths, loader.stats, with_near_duplicates),
        loader.stats,
        _histogram(everything),
        int((everything > loader.seq_length).sum()),
        float(has_loss.sum() / max(used.sum(), 1)),
        [
            _sample(tokenizer, row[there], loss[there])
            for row, there, loss in zip(ids[:samples], used, has_loss, strict=False)
        ],
    )


def _sources(
    mixture: Mixture,
    parts: list[StorePart],
    lengths: list[np.ndarray],
    stats: dict[str, Any],
    with_near_duplicates: bool,
) -> list[SourceReport]:
    drawn = {name: source["per_epoch"] for name, source in stats["sources"].items()}
    weights = mixture.weights
    seen, result = np.empty(0, np.uint64), []
    for part, document_lengths in zip(parts, lengths, strict=True):
        hashes = part.tokens.hashes[part.members]
        new = np.setdiff1d(hashes, seen)
        seen = np.union1d(seen, hashes)
        tally = part.tokens.tally
        result.append(
            SourceReport(
                part.label,
                tally.rows,
                len(part.members),
                int(document_lengths.sum()),
                drawn[part.label],
                drawn[part.label] / max(sum(drawn.values()), 1),
                None if weights is None else weights[part.label] / sum(weights.values()),
                dict(tally.dropped),
                tally.examples,
                len(hashes) - len(new),
                near_duplicates(part) if with_near_duplicates else None,
            )
        )
    return result


def _histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Count documents by length, in bins of doubling size."""
    top = max(int(lengths.max(initial=1)) - 1, 0).bit_length()
    bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bins, minlength=top + 1)
    first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
    return [(2**i, int(counts[i])) for i in range(first, top + 1)]


def _sample(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, loss: np.ndarray) -> Sample:
    ids, loss = ids[:_SHOWN], loss[:_SHOWN]
    cuts = [0, *(np.flatnonzero(np.diff(loss.astype(int))) + 1).tolist(), len(ids)]
    pairs = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    return [(str(tokenizer.decode(ids[a:b].tolist())), bool(loss[a])) for a, b in pairs]


def _mark_text(text: str, loss: bool, colour: bool) -> str:
    if colour:
        return f"{_LOSS if loss else _NO_LOSS}{text}{_PLAIN}"
    return text if loss else f"⟦{text}⟧"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


_HEAD = """<!doctype html><meta charset="utf-8"><title>data</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}
td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ddd}
.wide{width:30rem}.bar{background:#4a7;height:1rem}.loss{background:#cfc}.rest{color:#777}
pre{white-space:pre-wrap;background:#f7f7f7;padding:1rem}</style><h1>data</h1>"""


SHINGLE = 5
#: Minimum share of equal shingles of near-duplicates.
SIMILARITY = 0.8
_BANDS, _ROWS = 16, 4  # documents with equal rows in a band are compared
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def near_duplicates(part: StorePart, seed: int = 0) -> int:
    """Return the number of documents of an inform that are near-duplicates of an earlier document.

    The similarity is estimated from 64 hashes, so documents with a similarity close to `SIMILARITY`
    may be misclassified. Documents shorter than a shingle are compared as a whole.
    """
    signatures = _signatures(part, seed)
    is_duplicate = np.zeros(len(signatures), bool)
    for band in range(_BANDS):
        rows = signatures[:, band * _ROWS : (band + 1) * _ROWS]
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        leader = first[inverse.reshape(-1)]
        later = np.flatnonzero(leader < np.arange(len(leader)))
        similar = (signatures[later] == signatures[leader[later]]).mean(axis=1)
        is_duplicate[later[similar >= SIMILARITY]] = True
    return int(is_duplicate.sum())


def _signatures(part: StorePart, seed: int) -> NDArray[np.uint64]:
    """Return [documents, hashes]: the minimum of each hash function over the shingles."""
    rng = np.random.Generator(np.random.PCG64(seed))
    factors = rng.integers(1, 2**63, _BANDS * _ROWS, np.uint64) * np.uint64(2) + np.uint64(1)
    result = np.empty((len(part.members), len(factors)), np.uint64)
    lengths = part.tokens.lengths(part.members, 0)
    for i, (document, length) in enumerate(zip(part.members, lengths.tolist(), strict=True)):
        ids, _ = part.tokens.gather(np.array([document]), np.zeros(1, np.int64), np.array([length]))
        wide = min(SHINGLE, max(length, 1))
        tokens = ids.astype(np.uint64)
        shingles = np.zeros(max(length - wide + 1, 1), np.uint64)
        for offset in range(min(wide, length)):
            shingles = (shingles ^ tokens[offset : length - wide + 1 + offset]) * _MULTIPLIER
            shingles ^= shingles >> np.uint64(29)
        mixed = np.unique(shingles)[:, None] * factors
        result[i] = (mixed ^ (mixed >> np.uint64(31))).min(axis=0)
    return result
