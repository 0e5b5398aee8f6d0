"""Videos for vision-language models: their tokens, and the patches and times of their frames.

The processor has `video_processor`, that of `ed_models.checkpoints.tokenizers.load_processor`,
which reads files and computes tokens from their headers.

Legend: n frames of patches, p patches, f numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.media_access import FileTooLargeError, RemoteFile, read_media
from ed_data.rows.example import RowVideo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Name of the places of frames along time.
IMAGE_TIMES = "image_times"
#: Largest number of bytes of a video.
_MAX_BYTES = 2**30
#: Largest number of videos whose sizes are kept.
_MAX_SIZES = 2**14


class VideoReader(Protocol):
    """The video processor of `ed_models.checkpoints.video_processor`."""

    whole: bool

    def measure(self, source: object, /) -> Mapping[str, Any]: ...

    def convert(self, source: object, /) -> Mapping[str, Any]: ...

    def to_dict(self) -> dict[str, Any]: ...


class VideoTextProcessor(Protocol):
    """A processor of images, videos and text."""

    video_processor: VideoReader
    video_token_id: int
    tokenizer: PreTrainedTokenizerBase

    def replace_video_token(self, video_inputs: Mapping[str, Any], video_idx: int) -> str: ...


class VideoSize(NamedTuple):
    """Tokens of a video, and the grids [n, 3] and times [n] of its frames."""

    tokens: list[int]
    grids: NDArray[Any]
    times: NDArray[Any]
    features: int

    @property
    def patches(self) -> int:
        """Number of patches of all frames."""
        return int(self.grids.prod(axis=1).sum())


class VideoEncoder:
    """Computes the tokens and the patches of videos.

    Args:
        processor: a processor with `video_processor`.

    Attributes:
        token: id of the token that a chat template writes for a video, and of its features.
        is_timed: whether frames have places along time.
    """

    def __init__(self, processor: object) -> None:
        self._processor = cast(VideoTextProcessor, processor)
        self._reader = self._processor.video_processor
        self.token = self._processor.video_token_id
        self.is_timed = not self._reader.whole
        self._sizes: dict[str, VideoSize] = {}

    @staticmethod
    def fits(processor: object) -> bool:
        """Return whether a processor reads the files of videos."""
        return hasattr(getattr(processor, "video_processor", None), "measure")

    @property
    def fingerprint(self) -> list[object]:
        """Settings that tokens and patches depend on."""
        return [type(self._reader).__name__, self._reader.to_dict(), vars(self._reader).copy()]

    def measure(self, video: RowVideo) -> VideoSize:
        """Return the tokens and sizes of a video, without decoding its frames.

        Raises:
            DataError: the video cannot be read, or exceeds a limit.
        """
        size = self._sizes.get(video.location)
        if size is None:
            output = self._run(self._reader.measure, video)
            text = self._processor.replace_video_token(output, 0)
            tokens = cast(
                list[int], self._processor.tokenizer(text, add_special_tokens=False).input_ids
            )
            grids = np.repeat(
                np.asarray(output["video_grid_thw"]), len(output[IMAGE_TIMES]), axis=0
            )
            grids[:, 0] = 1
            size = VideoSize(tokens, grids, output[IMAGE_TIMES], tokens.count(self.token))
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            self._sizes[video.location] = size
        return size

    def pack_patches(self, video: RowVideo) -> NDArray[Any]:
        """Return the patches [p, f] of a video. Raises DataError."""
        return self._run(self._reader.convert, video)["pixel_values_videos"]

    def _run(
        self, work: Callable[[object], Mapping[str, Any]], video: RowVideo
    ) -> Mapping[str, Any]:
        try:
            return work(_read_source(video.source))
        except FileTooLargeError as error:
            reason: object = f"the file has more than {_MAX_BYTES} bytes"
            raise _unreadable(video, reason) from error
        except (ValueError, OSError) as error:
            raise _unreadable(video, error) from error


def _read_source(source: object) -> object:
    """Return a local path, the content of another file, or a list of them."""
    if isinstance(source, list):
        return [_read_source(picture) for picture in source]
    return read_media(source, _MAX_BYTES) if isinstance(source, RemoteFile) else source


def _unreadable(video: RowVideo, reason: object) -> DataError:
    return DataError(
        f"{video.location}: the video cannot be read: {reason}; correct the row, or set on_error: "
        "skip"
    )
