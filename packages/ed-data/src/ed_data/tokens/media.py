"""The encoders of images and recordings that a run requires, and the places of media in texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ed_data.checks import without_recordings, without_tokens, without_transcripts
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_data.rows.contents import get_kind
from ed_data.rows.example import Example, RowAudio, RowImage, RowMedium, RowVideo
from ed_data.schema import Content, Schema
from ed_data.tokens.audio import LONGEST_SECONDS, AudioEncoder, SpeechProcessor, TimeSteps
from ed_data.tokens.chat_recordings import RecordingEncoder, RecordingLayout
from ed_data.tokens.images import ImageEncoder, ModelProcessor
from ed_data.tokens.items import MediumEncoder, get_placeholder
from ed_data.tokens.patches import PatchEncoder, PlacedEncoder, RowEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def medium_encoders(
    mixture: Mixture,
    schema: Schema,
    processor: ModelProcessor | SpeechProcessor | None,
    *,
    start: int | None = None,
    steps: TimeSteps | None = None,
    recordings: RecordingLayout | None = None,
) -> tuple[MediumEncoder | None, AudioEncoder | None]:
    """Return the encoder of the images or recordings of chats, and that of recordings with
    transcripts; each is None if the data have none.

    Args:
        mixture: the sources.
        schema: see `build_loader`.
        processor: see `build_loader`.
        start: `decoder_start_token_id`.
        steps: see `build_loader`.
        recordings: see `build_loader`.

    Raises:
        DataError: the data or the schema require another processor.
    """
    if schema.kind.has_image:
        if processor is None:
            raise DataError(
                f"a schema of task {schema.task} requires a processor: pass the AutoProcessor or "
                "the AutoImageProcessor of the model"
            )
        return ImageEncoder(processor, placed=False), None  # type: ignore[arg-type]
    if not schema.kind.has_audio and recordings is not None and processor is not None:
        for path, message in without_transcripts(mixture):
            raise DataError(message, path)
        return RecordingEncoder(processor, recordings), None  # type: ignore[arg-type]
    if not schema.kind.has_audio:
        for path, message in without_recordings(mixture):
            raise DataError(message, path)
        if processor is not None:
            kinds = (RowEncoder, PlacedEncoder, PatchEncoder)
            kind = next((kind for kind in kinds if kind.fits(processor)), ImageEncoder)
            return kind(processor), None  # type: ignore[arg-type]
        for path, message in without_tokens(mixture):
            raise DataError(message, path)
        return None, None
    if processor is None:
        raise DataError(
            f"a schema of task {schema.task} requires a processor: pass the AutoProcessor of the "
            "model"
        )
    limits = [i.max_duration_in_seconds for i in (*mixture.informs, *mixture.eval_informs)]
    audio = AudioEncoder(
        processor,
        schema.kind,
        language=mixture.tokenization.language,
        speech_task=mixture.tokenization.task,
        start=start,
        steps=steps,
        longest=max((limit or LONGEST_SECONDS for limit in limits), default=LONGEST_SECONDS),
        padded=mixture.tokenization.padding == "max_length",
    )
    return None, audio


def prepare_media(
    documents: Sequence[Example],
    media: MediumEncoder | None,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    label: str,
) -> list[Example]:
    """Return documents whose texts have a placeholder for each of their media.

    Media without a placeholder are before the text of a document, or before the text of the first
    message of the user, as in TRL.

    Args:
        documents: the documents of one inform.
        media: the encoder of the media; None if the model reads none.
        tokenizer: a tokenizer of transformers.
        content: the field with the content or the prompt, with which the tokens begin.
        label: name of the inform, for messages.

    Raises:
        DataError: a chat has images or recordings, and the model reads none.
    """
    reads = media.reads if media is not None else ()
    for document in documents:
        unread_media = [medium for medium in document.media if not isinstance(medium, reads)]
        chats = [field for field in document.fields.values() if get_kind(field) == "chat"]
        part, noun = _get_part(unread_media[0]) if unread_media else ("", "")
        if unread_media and any(_mentions(chat, part) for chat in chats):
            raise DataError(
                f"inform {label!r}, {document.place}: the messages contain {noun}: pass the "
                f"processor of a model that reads {noun}, or remove the {noun} in "
                "format_callback"
            )
    if media is None or media.token is None:
        return list(documents)
    ids = [token for token in (media.token, media.video_token) if token is not None]
    names = dict(zip(ids, map(str, tokenizer.convert_ids_to_tokens(ids)), strict=True))
    return [_place_media(document, content, media, names) for document in documents]


#: Class of media -> the type of their parts, and their noun.
_PARTS: dict[type, tuple[str, str]] = {
    RowImage: ("image", "images"),
    RowVideo: ("video", "videos"),
    RowAudio: ("audio", "recordings"),
}


def _get_part(medium: RowMedium) -> tuple[str, str]:
    return _PARTS[type(medium)]


def _place_media(
    document: Example, content: str, media: MediumEncoder, names: dict[int, str]
) -> Example:
    """Return a document with placeholders, unless its texts have some."""
    kinds = [_get_part(medium)[0] for medium in document.media]
    mentioned = (
        _mentions(field, part, token)
        for field in document.fields.values()
        for part in dict.fromkeys((media.part, *kinds))
        for token in names.values()
    )
    if not document.media or any(mentioned):
        return document
    fields = dict(document.fields)
    chats = [name for name, field in fields.items() if get_kind(field) == "chat"]
    text = fields[content]
    if isinstance(text, str) and not chats:
        tokens = [names[get_placeholder(media, medium) or 0] for medium in document.media]
        return replace(document, fields={**fields, content: "".join(tokens) + text})
    parts = [{"type": kind} for kind in kinds]
    for name in chats:
        messages: list[Any] = list(fields[name])
        for place, message in enumerate(messages):
            text = message.get("content")
            if message.get("role") == "user" and isinstance(text, str | list):
                texts = [{"type": "text", "text": text}] if isinstance(text, str) else text
                messages[place] = {**message, "content": [*parts, *texts]}
                return replace(document, fields={**fields, name: messages})
    return document


def _mentions(content: Content, part: str, token: str | None = None) -> bool:
    """Return whether a content has a part or a token that represents a medium."""
    if isinstance(content, str):
        return token is not None and token in content
    texts = [message.get("content") for message in content if isinstance(message, dict)]
    pieces = [piece for text in texts for piece in (text if isinstance(text, list) else [text])]
    return any(
        piece.get("type") == part or _mentions(str(piece.get("text") or ""), part, token)
        if isinstance(piece, dict)
        else isinstance(piece, str) and _mentions(piece, part, token)
        for piece in pieces
    )
