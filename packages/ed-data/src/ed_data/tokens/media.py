"""The encoders of images and recordings that the data and the processor of a run require."""

from __future__ import annotations

from ed_data.checks import without_recordings, without_tokens, without_transcripts
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_data.schema import Schema
from ed_data.tokens.audio import LONGEST_SECONDS, AudioEncoder, SpeechProcessor, TimeSteps
from ed_data.tokens.chat_recordings import RecordingEncoder, RecordingLayout
from ed_data.tokens.images import ImageEncoder, ModelProcessor
from ed_data.tokens.items import MediumEncoder
from ed_data.tokens.patches import PatchEncoder, PlacedEncoder, RowEncoder


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
    if schema.has_image:
        if processor is None:
            raise DataError(
                f"a schema of task {schema.task} requires a processor: pass the AutoProcessor or "
                "the AutoImageProcessor of the model"
            )
        return ImageEncoder(processor, placed=False), None  # type: ignore[arg-type]
    if not schema.has_audio and recordings is not None and processor is not None:
        for path, message in without_transcripts(mixture):
            raise DataError(message, path)
        return RecordingEncoder(processor, recordings), None  # type: ignore[arg-type]
    if not schema.has_audio:
        for path, message in without_recordings(mixture):
            raise DataError(message, path)
        if processor is not None:
            kinds = (RowEncoder, PlacedEncoder, PatchEncoder)
            kind = next((kind for kind in kinds if kind.fits(processor)), ImageEncoder)  # type: ignore
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
        processor,  # type: ignore[arg-type]
        schema.task,
        language=mixture.tokenization.language,
        speech_task=mixture.tokenization.task,
        start=start,
        steps=steps,
        longest=max((limit or LONGEST_SECONDS for limit in limits), default=LONGEST_SECONDS),
        padded=mixture.tokenization.padding == "max_length",
    )
    return None, audio
