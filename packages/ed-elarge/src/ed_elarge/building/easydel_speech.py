"""EasyDeL's objects for speech: `vWhisperInference`, its configuration, and its server.

A `vWhisperInference` is a `Transcriber` that reads files and addresses, and returns a mapping as
EasyDeL does. Nothing else imports this module.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypedDict, cast
from urllib.parse import urlsplit

import numpy as np
from ed_data.config.media import WEB, Host, parse_scheme
from ed_data.media_access import RemoteFile, read_media
from ed_esurge.speech.audio import decode_audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.samples import resample_blocks
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from ed_models.speech import Transcriber, Transcript, load_transcriber
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase, ProcessorMixin

#: Limits of a recording: bytes of its file, and seconds.
LARGEST_FILE, LONGEST_SECONDS = 2**31, 12 * 3600.0
#: Flags of EasyDeL's server for speech, and their defaults.
SERVED = {
    "--model": "openai/whisper-large-v3-turbo",
    "--host": "0.0.0.0",
    "--port": "8000",
    "--dtype": "bfloat16",
}
#: A recording: a path or an address, a file's content, samples at the rate of the model, or samples
#: with their rate under the names of `datasets`.
Recording = str | os.PathLike[str] | bytes | np.ndarray | Mapping[str, object]
Times = bool | Literal["word"]


class Chunk(TypedDict):
    """A piece of a transcript with its times in seconds."""

    text: str
    timestamp: tuple[float, float]


class SpokenText(TypedDict, total=False):
    """A transcript; `chunks` only with times."""

    text: str
    chunks: list[Chunk]


@dataclass(frozen=True)
class vWhisperInferenceConfig:
    """Options of `vWhisperInference`; the arguments of a call have precedence.

    Attributes:
        batch_size: without effect: windows follow each other, because each reads the text before.
        max_length: most tokens of a window, with those of language, task and times.
        return_timestamps: whether the result has times.
        task: "transcribe", or "translate" to English; None is "transcribe".
        language: a code or an English name; None detects the language.
        is_multilingual: what the model must be; None accepts both.
    """

    batch_size: int | None = 1
    max_length: int | None = None
    return_timestamps: Times | None = None
    task: str | None = None
    language: str | None = None
    is_multilingual: bool | None = None


class vWhisperInference(Transcriber):
    """Turns recordings into text.

    Args:
        model: a model for speech.
        tokenizer: the tokenizer of the processor, or another one; None: that of the processor.
        processor: the processor of the checkpoint.
        inference_config: options of all calls.
        dtype: without effect, as in EasyDeL: the model was loaded with its dtype.

    Raises:
        ConfigError: an option does not fit the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        inference_config: vWhisperInferenceConfig | None = None,
        dtype: DTypeLike | None = None,
    ):
        if processor is None:
            raise ConfigError(
                "vWhisperInference needs the processor of the checkpoint: pass "
                "processor=WhisperProcessor.from_pretrained(...)"
            )
        super().__init__(model, processor)
        self.tokenizer = processor.tokenizer if tokenizer is None else tokenizer
        self.inference_config = inference_config or vWhisperInferenceConfig()
        self._check_options()

    def _check_options(self) -> None:
        options = self.inference_config
        if options.is_multilingual not in (None, bool(self.languages)):
            kind = "several languages" if self.languages else "one language"
            raise ConfigError(
                f"is_multilingual is {options.is_multilingual}, and the model knows {kind}: omit it"
            )

    def get_text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without special tokens."""
        ids = [int(token) for token in tokens]
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=True))

    @cached_property
    def _decoder_process(self) -> DecoderProcess:
        return DecoderProcess()

    def read_samples(self, recording: Recording) -> np.ndarray:
        """Return the samples of a recording at the rate of the model.

        Raises:
            ConfigError: a mapping has no samples or no rate.
            OSError: a file or an address cannot be read.
            AudioError: a file is no recording.
        """
        if isinstance(recording, np.ndarray):
            return recording
        if isinstance(recording, Mapping):
            return self._resample(recording)
        if not isinstance(recording, bytes):
            recording = _read_recording(os.fspath(recording))
        return decode_audio(recording, self.sampling_rate, LONGEST_SECONDS, self._decoder_process)

    def _resample(self, recording: Mapping[str, object]) -> np.ndarray:
        samples = recording.get("array", recording.get("raw"))
        rate = recording.get("sampling_rate")
        if not isinstance(samples, np.ndarray | list) or not isinstance(rate, int) or rate < 1:
            raise ConfigError(
                f"a recording has the keys {sorted(map(str, recording))}: it needs array, the "
                "samples, and sampling_rate, a positive number"
            )
        blocks = [np.asarray(samples, np.float32)]
        return np.concatenate([*resample_blocks(blocks, rate, self.sampling_rate)])

    def __call__(
        self,
        audio_input: Recording,
        chunk_length_s: float | None = None,
        stride_length_s: float | Sequence[float] | None = None,
        batch_size: int | None = None,
        language: str | None = None,
        task: str | None = None,
        return_timestamps: Times | None = None,
    ) -> SpokenText:
        """Return the text of a recording of any length.

        Args:
            audio_input: the recording; see `Recording`.
            chunk_length_s, stride_length_s, batch_size: without effect, and one warning says so:
                the windows of the model follow each other and do not overlap.
            language, task, return_timestamps: see `vWhisperInferenceConfig`. "word" returns the
                times of words.
        """
        cuts = {"chunk_length_s": chunk_length_s, "stride_length_s": stride_length_s}
        cuts["batch_size"] = batch_size
        if names := [name for name, value in cuts.items() if value is not None]:
            warnings.warn(
                f"arguments of EasyDeL that are not needed here: {', '.join(names)} (the windows "
                "of the model follow each other and do not overlap)",
                stacklevel=2,
            )
        options = self.inference_config
        times = options.return_timestamps if return_timestamps is None else return_timestamps
        transcript = self.transcribe(
            self.read_samples(audio_input),
            language=language or options.language,
            task=task or options.task or "transcribe",
            timestamps=bool(times) and "timestamps" in self.options,
            word_timestamps=times == "word",
            max_new_tokens=self._count_new_tokens(bool(times)),
        )
        result: SpokenText = {"text": transcript.text}
        return {**result, "chunks": list_chunks(transcript, times)} if times else result

    generate = __call__

    def _count_new_tokens(self, has_times: bool) -> int | None:
        """Return the number of tokens of a window after those of the request."""
        length = self.inference_config.max_length
        if length is None:
            return None
        first = 1 + bool(self.languages) + (len(self.tasks) > 1) + (not has_times)
        if length <= first:
            raise ConfigError(f"max_length is {length}, and {first} tokens begin each window")
        return length - first


def list_chunks(transcript: Transcript, times: Times) -> list[Chunk]:
    """Return the segments of a transcript, or its words."""
    pieces = list(transcript.segments)
    if times == "word":
        pieces = [word for segment in transcript.segments for word in segment.words or ()]
    return [{"text": one.text, "timestamp": (one.start, one.end)} for one in pieces]


def _read_recording(place: str) -> bytes:
    """Return the content of a file of this machine, of a host, or of a store."""
    scheme = parse_scheme(place)
    if scheme is None:
        return read_media(os.path.realpath(place), LARGEST_FILE)
    name = urlsplit(place).hostname or ""
    hosts = (Host(name, scheme),) if scheme in WEB else ()
    return read_media(RemoteFile(place, hosts), LARGEST_FILE)


def run_server(
    model_name: str = SERVED["--model"],
    *,
    dtype: DTypeLike = SERVED["--dtype"],
    **options: object,
) -> None:
    """Serve a model for speech by the API of OpenAI, until a signal.

    Args:
        model_name: a directory or a hub repository; also the name of the model in requests.
        dtype: dtype of the model.
        options: fields of `ListenOptions`, such as `host` and `port`, whose defaults are those of
            EasyDeL.
    """
    from ed_esurge.server.launch import eSurgeApiServer
    from ed_esurge.speech.engine import SpeechEngine

    engine = SpeechEngine(load_transcriber(model_name, dtype=dtype, param_dtype=dtype), model_name)
    address = {"host": SERVED["--host"], "port": int(SERVED["--port"])}
    run = cast("Callable[..., None]", eSurgeApiServer(engine).run)
    run(**{**address, **options})


def main() -> None:
    """Run `python -m easydel.inference.vwhisper.cli`, which is `esurge serve` with its defaults."""
    from ed_esurge.command.main import main as serve

    flags = [word.partition("=")[0] for word in sys.argv]
    missing = [(flag, value) for flag, value in SERVED.items() if flag not in flags]
    sys.argv[1:] = ["serve", *sys.argv[1:], *(word for pair in missing for word in pair)]
    serve()
