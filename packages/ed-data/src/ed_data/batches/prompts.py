"""Prompts for rollouts: the original text, its token ids, and the fields of its row.

A method that trains on sampled completions passes the ids to an engine, and the text and the fields
(a reference answer, tests, …) to its reward functions. It needs no packed rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ed_data.batches.loader import check_state, hash_json
from ed_data.checks import check_names, find_unsupported_keys
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_data.order.mixing import DocumentOrder
from ed_data.order.options import document_order, order_details
from ed_data.rows.documents import Documents
from ed_data.rows.example import Example
from ed_data.rows.splits import default_cache_dir, file_cache, prefix_error_path, split_members
from ed_data.schema import COMPLETION, PROMPT, Content, Schema
from ed_data.sources import open_source
from ed_data.storage.lazy import ReadAgain
from ed_data.storage.prepare import report
from ed_data.storage.store import compute_digest
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.images import ModelProcessor
from ed_data.tokens.media import medium_encoders
from ed_data.tokens.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: Number of prompts after which scheduled weights change without block_mixture.
_BLOCK = 2048


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts.

    Attributes:
        prompts: the original texts, chat messages or ids.
        input_ids: tokens of each prompt; a chat ends with the start of an answer.
        fields: the `additional_fields` of the informs, by name: one value for each prompt, None if
            the inform of the prompt does not have the field. `image_target_field` contains the
            images of rows with images.
        sources: name of the inform of each prompt.
        images: arrays of the images of the prompts, a row for each prompt; see
            `ed_data.tokens.images.ImageEncoder.arrays`. Empty without a processor.
    """

    prompts: list[Content]
    input_ids: list[list[int]]
    fields: dict[str, list[Any]]
    sources: list[str]
    images: dict[str, NDArray[Any]]
    _answered: Callable[[int, list[Content]], list[list[int]]] = field(repr=False, compare=False)
    _encode_prompt: Callable[[int, Content], list[int]] = field(repr=False, compare=False)

    def with_answers(self, number: int, answers: Sequence[Content]) -> list[list[int]]:
        """Return the tokens of a prompt with each answer, encoded like rows for training.

        A reward model scores these tokens, because it was trained with the same encoding.

        Args:
            number: number of the prompt in the batch.
            answers: texts, chats or ids, of the same kind as the prompt.

        Returns:
            The tokens of each document, including its end token.
        """
        return self._answered(number, list(answers))

    def with_prompt(self, number: int, prompt: Content) -> list[int]:
        """Return the tokens of another prompt for a row, encoded like the prompts of the batch.

        Args:
            number: number of the replaced prompt in the batch.
            prompt: text, chat or ids.
        """
        return self._encode_prompt(number, prompt)


class _Source(NamedTuple):
    """The prompts of one inform that belong to the split."""

    label: str
    documents: ReadAgain
    members: np.ndarray


class PromptLoader:
    """Prompts by step; a batch is a function of the mixture, the seed and the step.

    Created by `build_prompts`. Training prompts are endless. Evaluation reads each prompt once, and
    its last batch may have fewer prompts.

    Attributes:
        batch_size: number of prompts of a batch.
        split: `"train"` or `"eval"`.
        fingerprint: hash of everything that the batches depend on.
        stats: for each source the number of `documents`, and of `dropped` rows by reason.
    """

    def __init__(
        self,
        sources: Sequence[_Source],
        order: DocumentOrder,
        encoder: Encoder,
        batch_size: int,
        split: str,
        details: dict[str, Any],
        stats: dict[str, Any],
        image: str,
    ) -> None:
        self._image = image
        self.batch_size, self.split, self.stats = batch_size, split, stats
        self.fingerprint = hash_json(details)
        self._sources, self._order, self._encoder = sources, order, encoder
        self._details, self._step = details, 0
        self._lock = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch: full ones for training (at least 1), otherwise all."""
        size = self._order.epoch_size
        if self.split == "train":
            return max(size // self.batch_size, 1)
        return -(-size // self.batch_size)

    def count_steps(self, epochs: int) -> int:
        """Return the number of batches in which each prompt occurs `epochs` times."""
        return -(-self._order.epoch_size * epochs // self.batch_size)

    def batch_at(self, step: int) -> Prompts:
        """Return the prompts of a step.

        Raises:
            IndexError: the step is negative, or after the end of evaluation data.
        """
        if step < 0 or (self.split == "eval" and step >= self.steps_per_epoch):
            raise IndexError(f"step {step} does not exist")
        at, remaining_prompts = step * self.batch_size, self.batch_size
        drawn: list[tuple[int, int]] = []
        while remaining_prompts:
            epoch, start = divmod(at, self._order.epoch_size)
            informs, numbers = self._order.take(epoch, start, start + remaining_prompts)
            drawn += zip(informs.tolist(), numbers.tolist(), strict=True)
            at, remaining_prompts = at + len(informs), remaining_prompts - len(informs)
            if self.split == "eval":
                break
        with self._lock:
            examples = [self._sources[i].documents[self._sources[i].members[n]] for i, n in drawn]
        labels = [self._sources[i].label for i, _ in drawn]
        encode = self._encoder.encode_prompts
        names = dict.fromkeys(name for example in examples for name in example.extra)
        fields = {name: [example.extra.get(name) for example in examples] for name in names}
        if any(example.image is not None for example in examples):
            fields[self._image] = [example.image for example in examples]

        def encode_answers(number: int, answers: list[Content]) -> list[list[int]]:
            example = examples[number]
            documents = [
                replace(example, fields={"prompt": example.content, "completion": answer})
                for answer in answers
            ]
            encoder = replace(self._encoder, schema=COMPLETION)
            return [ids.tolist() for ids in encoder.encode(documents, labels[number]).tokens]

        def encode_prompt(number: int, prompt: Content) -> list[int]:
            example = replace(examples[number], fields={"prompt": prompt})
            return encode([example], labels[number])[0]

        return Prompts(
            [example.content for example in examples],
            [encode([e], label)[0] for e, label in zip(examples, labels, strict=True)],
            fields,
            labels,
            self._pixels(examples),
            encode_answers,
            encode_prompt,
        )

    def _pixels(self, examples: Sequence[Example]) -> dict[str, NDArray[Any]]:
        """Return the arrays of the images of prompts, a row for each prompt."""
        encoder = self._encoder.media
        if encoder is None:
            return {}
        images = [example.images for example in examples]
        return encoder.arrays(dict(enumerate(images)), len(images), encoder.width(images))

    def close(self) -> None:
        """Do nothing; a prompt loader has no background work."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the prompts depend on; the caller stores the step."""
        return {"fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a saved state belongs to the same prompts.

        Raises:
            DataError: the state belongs to other data or options; the message lists them.
        """
        check_state(state, self.fingerprint, self._details)


def build_prompts(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int | None = None,
    seed: int | None = None,
    split: str = "train",
    cache_dir: str | None = None,
    shuffle: bool = True,
    schema: Schema = PROMPT,
    processor: ModelProcessor | None = None,
    embedding_rows: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptLoader:
    """Return the loader of a mixture's prompts.

    `content_field` names the field with the prompt (default `prompt`), and `additional_fields` the
    fields that batches contain in addition. Prompts are not truncated: prompts longer than
    `tokenization.max_length` are dropped and counted.

    Args:
        mixture: the sources, and how they are mixed.
        tokenizer: tokenizer of the model, used unless `mixture.tokenization.tokenizer` is set.
        batch_size: prompts of a batch; default `mixture.batch_size`, else 1.
        seed: used if `mixture.seed` is not set; default 42.
        split: `"train"` or `"eval"`.
        cache_dir: folder for copies of remote files, used if `mixture.cache_dir` is not set.
        shuffle: False keeps the order of training prompts.
        schema: the field of the prompt.
        processor: processor of a vision-language model. Batches then contain `images`, and the
            prompts one placeholder token for each feature of an image.
        embedding_rows: number of rows of the model's embedding. A prompt with a larger id is then
            an error.
        tools: JSON schemas that the chat template renders, for rows without the field `tools`.

    Raises:
        DataError: a name cannot be resolved, data is missing or empty, or a row cannot be read.
    """
    for path, message in (*check_names(mixture, schema), *find_unsupported_keys(mixture, schema)):
        raise DataError(message, path)
    seed = mixture.seed if mixture.seed is not None else 42 if seed is None else seed
    media = None
    if processor is not None:
        media, _ = medium_encoders(mixture, schema, processor)
        tokenizer = processor.tokenizer if tokenizer is None else tokenizer
    tokenizer = load_tokenizer(mixture, tokenizer)
    encoder = Encoder.create(
        tokenizer,
        mixture.tokenization,
        mixture.pack_eos_token_id,
        schema,
        media,
        embedding_rows=embedding_rows,
    )
    files = file_cache(mixture, mixture.cache_dir or cache_dir or default_cache_dir())
    limit = mixture.tokenization.max_length

    def scan(key: str, number: int) -> tuple[_Source, np.ndarray, np.ndarray]:
        with prefix_error_path(key, number):
            inform = getattr(mixture, key)[number]
            source = open_source(inform, files)
            documents = Documents(inform, source, schema, media=mixture.media, tools=tools)
            reread_documents = ReadAgain(documents)
            examples: list[tuple[int, int]] = []
            short = []
            for i, example in enumerate(reread_documents):
                if encoder.embedding_rows is not None:
                    encoder.encode_prompts([example], inform.label)
                examples.append((example.digest, example.content_digest))
                if limit is None or _fits(encoder, example, inform.label, limit):
                    short.append(i)
                else:
                    documents.tally.drop(f"longer than max_length {limit}", example.place)
            report(inform.label, documents.tally)
            if not short:
                raise DataError(f"inform {inform.label!r} has no prompts: {documents.tally}")
            digests = np.array(examples, np.uint64).reshape(-1, 2)[short]
            return (
                _Source(inform.label, reread_documents, np.array(short)),
                digests[:, 0],
                digests[:, 1],
            )

    sources, digests = [], {}
    members = split_members(mixture, split, scan)
    for source, source_digests, member_numbers in members:
        sources.append(source._replace(members=source.members[member_numbers]))
        digests[f"{len(digests)}:{source.label}"] = compute_digest(
            source_digests, encoder.fingerprint
        )
    shuffle = shuffle and split == "train"
    labels, sizes = [s.label for s in sources], [len(s.members) for s in sources]
    order = document_order(mixture, labels, sizes, split, seed, shuffle)
    rows = batch_size or mixture.batch_size or 1
    block = min(mixture.mixture_block_size if mixture.block_mixture else _BLOCK, order.epoch_size)
    blocks = -(-order.epoch_size // block)

    def first_step(number: int) -> int:
        """Return the step at which a block begins; each document is one row."""
        epoch, place = divmod(number, blocks)
        return (epoch * order.epoch_size + place * block) // rows

    order.set_windows(block, first_step)
    details = {
        "data": {"split": split, "eval_fraction": mixture.eval_fraction, "sources": digests},
        "tokenizer": encoder.fingerprint,
        "order": {**order_details(mixture, split, seed, shuffle), "max_length": limit},
        "batch_size": rows,
    }
    stats = {
        source.label: {
            "documents": len(source.members),
            "dropped": dict(source.documents.tally.dropped),
        }
        for source in sources
    }
    return PromptLoader(
        sources,
        order,
        encoder,
        rows,
        split,
        details,
        {"sources": stats},
        mixture.image_target_field,
    )


def _fits(encoder: Encoder, example: Example, label: str, limit: int) -> bool:
    return len(encoder.encode_prompts([example], label)[0]) <= limit
