"""Inputs and outputs of the encoders: fields of documents, and sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.example import RowVideo
from ed_data.schema import Content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ed_data.rows.example import Example

T = TypeVar("T")


class DocumentField(NamedTuple):
    """One field of one document, its location for messages, and arguments of the chat template."""

    content: Content
    location: str
    template: Mapping[str, Any] = MappingProxyType({})


class TokenSequence(NamedTuple):
    """One sequence of tokens.

    Attributes:
        ids: the tokens.
        mask: 1 for tokens with loss; None if every token has loss.
        prompt: number of tokens at the beginning that have no loss in any case.
        places: index of the token with the value of each step or word; -1: there is none.
        types: token types of a pair of texts.
        span: first and last token of an answer.
    """

    ids: list[int]
    mask: list[int] | None = None
    prompt: int = 0
    places: tuple[int, ...] = ()
    types: tuple[int, ...] = ()
    span: tuple[int, int] | None = None

    def with_media(
        self, tokens: Collection[int], media: Sequence[list[int]], spaces: WhiteSpace
    ) -> TokenSequence:
        """Replace the placeholder of each medium by the tokens of the medium; they have no loss.

        Args:
            tokens: ids of the placeholders, one of which occurs once for each medium.
            media: tokens of each image or recording.
            spaces: encodes the white space at both sides of a border as one text.
        """
        ids, mask, borders, prompt = list[int](), list[int](), list[int](), 0
        flags, remaining = self.mask or [1] * len(self.ids), iter(media)
        for place, (token_id, flag) in enumerate(zip(self.ids, flags, strict=True), start=1):
            is_medium = token_id in tokens
            new = next(remaining) if is_medium else [token_id]
            ids += new
            mask += [0] * len(new) if is_medium else [flag]
            if is_medium:
                borders += [len(ids) - len(new), len(ids)]
            if place == self.prompt:
                prompt = len(ids)
        for border in reversed(borders):
            first, last, joined = spaces.join_spaces(ids, border)
            if joined is not None:
                ids[first:last], mask[first:last] = joined, [0] * len(joined)
                prompt += (len(joined) - (last - first)) * (prompt >= last)
        return TokenSequence(ids, mask, prompt, self.places)


class MediumTokens(NamedTuple):
    """The tokens of an image or a recording, and the number of its tiles or parts."""

    ids: list[int]
    tiles: int


class MediumEncoder(Protocol):
    """Computes the tokens and the arrays of the images or of the recordings of documents.

    Attributes:
        noun: the kind of media in messages.
        part: the type of their parts in chat templates.
        reads: the class of the media, `RowImage` or `RowAudio`.
        token: id of the token that a chat template writes for a medium; None if tokens mention no
            media.
        feature: id of the placeholder token of a feature.
        video_token: the token of a video and of its features; None if the model reads no videos.
    """

    noun: str
    part: str
    reads: type | tuple[type, ...]
    video_token: int | None
    token: int | None
    feature: int

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the tokens and arrays depend on."""
        ...

    @property
    def marks_prompts(self) -> bool:
        """Whether the model reads token types, which separate the tokens before the first
        one with loss from the others."""
        ...

    def tokens(self, medium: object, /) -> MediumTokens:
        """Return the tokens of a medium, which depend on its size. Raises DataError."""
        ...

    def width(self, rows: Sequence[Sequence[Any]], /) -> tuple[int, ...]:
        """Return the sizes of the arrays for the media of all rows of a batch."""
        ...

    def arrays(
        self, media: Mapping[int, Sequence[Any]], rows: int, width: tuple[int, ...], /
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays of a batch from the media by row. Raises DataError."""
        ...

    def check(self, medium: object, /) -> None:
        """Decode a medium, whose tokens follow from its header alone. Raises DataError."""
        ...


def get_placeholder(media: MediumEncoder, medium: object) -> int | None:
    """Return the token that a chat template writes for a medium."""
    return media.video_token if isinstance(medium, RowVideo) else media.token


class WhiteSpace:
    """Encodes adjacent tokens of white space as one text.

    A tokenizer may have one token for several lines (Gemma), so the tokens of an image and those of
    the text next to the image are not always the tokens of the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._known: dict[int, bool] = {}

    def join_spaces(self, ids: list[int], border: int) -> tuple[int, int, list[int] | None]:
        """Return a run of white space around a border: the first token, the one after the last, and
        the tokens of the run as one text. None = the tokens do not change."""
        first = last = border
        while first > 0 and self._is_space(ids[first - 1]):
            first -= 1
        while last < len(ids) and self._is_space(ids[last]):
            last += 1
        sides = ids[first:border], ids[border:last]
        if not all(sides) or any(self._reencode_tokens(side) != side for side in sides):
            return first, last, None
        return first, last, self._reencode_tokens(ids[first:last])

    def _is_space(self, token: int) -> bool:
        if token not in self._known:
            text = str(self._tokenizer.decode([token]))
            self._known[token] = token not in self._special and text.isspace()
        return self._known[token]

    def _reencode_tokens(self, ids: list[int]) -> list[int]:
        return self._tokenizer(self._tokenizer.decode(ids), add_special_tokens=False)["input_ids"]


def append_eos(ids: list[int], eos: int) -> list[int]:
    """Return the tokens of a document, which end with `eos`."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def with_blame(
    call: Callable[[list[DocumentField]], list[T]], items: list[DocumentField], problem: str
) -> list[T]:
    """Call the function with all items; if it fails, find the row that causes the error."""
    try:
        return call(items)
    except Exception as error:  # a template may raise any error, of jinja or of Python
        blamed, reason = items[0], error
        for item in items:
            try:
                call([item])
            except Exception as own:
                blamed, reason = item, own
                break
        raise DataError(
            f"{blamed.location}: {problem}: {reason}; correct the row, or drop it in "
            "format_callback"
        ) from error


class EmbeddedTokenizer(Protocol):
    """A tokenizer, and the number of rows of the model's embedding; None = each id has a row."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def embedding_rows(self) -> int | None: ...


def check_embedding_rows(
    of: EmbeddedTokenizer,
    documents: Sequence[Example],
    sequences: Sequence[TokenSequence],
    label: str,
) -> None:
    """Check that each id of the documents has a row in the embedding of the model.

    Raises:
        DataError: an id has no row.
    """
    rows = of.embedding_rows
    if rows is None:
        return
    for document, sequence in zip(documents, sequences, strict=True):
        largest = max(sequence.ids, default=0)
        if largest >= rows:
            raise DataError(
                f"inform {label!r}, {document.place}: the token "
                f"{of.tokenizer.convert_ids_to_tokens(largest)!r} has the id {largest}, and the "
                f"model has {rows} rows of embeddings (ids 0 to {rows - 1}): use the tokenizer of "
                "the model, remove the token from the data or the chat template, or add rows to "
                "the model (in a run file: model: {resize_token_embeddings: true})"
            )


def mask_prompt(tokens: TokenSequence, prompt: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the ids, and 1 for each token with loss; the prompt has no loss."""
    ids = np.asarray(tokens.ids, np.int64)
    mask = tokens.mask
    flags = np.ones(len(ids), np.uint8) if mask is None else np.array(mask, np.uint8)
    flags[:prompt] = 0
    return ids, flags
