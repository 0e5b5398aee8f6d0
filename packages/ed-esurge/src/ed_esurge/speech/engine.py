"""`SpeechEngine`: serves a `Transcriber` of ed-models to many clients."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.children.process import JobGroup
from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.engine.facts import describe_dtypes
from ed_esurge.engine.intake import CheckedPrompt, RequestOptions
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.speech.audio import SHORTEST, decode_audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.options import TranscriptionOptions
from ed_esurge.speech.turns import DeviceTurns, TurnPlaces

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

#: Transcriptions that run at the same time. They take turns, so this number bounds the memory.
RUNNING = 4
#: Seconds of one attempt after which the engine counts as stuck. The first attempt compiles.
STUCK_SECONDS = 1800.0
#: Tasks of the models that this engine serves.
SPEECH_TASKS = (TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, TaskType.CTC)


#: Options of the engine that have an effect on a model for speech.
_OPTIONS = frozenset({"compile_in_background", "compile_runner", "silent_mode"})


def unused_options(options: EngineConfig) -> list[str]:
    """Return the options that are set and have no effect on a model for speech."""
    return sorted(options.model_fields_set - _OPTIONS)


class _AbortedError(Exception):
    """The client has left."""


class SpeechEngine:
    """Runs transcriptions in threads. Implements `ed_esurge.server.generation.ServedEngine`.

    Each transcription has a thread, and at most `RUNNING` threads run. The threads share the
    device: before each attempt to decode a window, a thread lets the threads of other clients
    compute.

    Args:
        transcriber: a `Transcriber` of ed-models.
        model_name: name of the model in requests.
    """

    is_sleeping = False

    def __init__(self, transcriber: Any, model_name: str = "whisper") -> None:
        self.transcriber, self.model_name = transcriber, model_name
        self.config = EngineConfig()
        self.tokenizer = transcriber.processor.tokenizer
        self.task: TaskType = transcriber.task
        config = transcriber.model.config
        self.vocab_size = int(config.vocab_size)
        names = ("max_target_positions", "max_position_embeddings")
        limits = [getattr(config, name) for name in names if getattr(config, name, None)]
        self.max_model_len = int(limits[0]) if limits else 2**20  # a CTC model writes no tokens
        self._places, self._turns = TurnPlaces(RUNNING), DeviceTurns()
        self._files = DecoderProcess()
        self._threads = ThreadPoolExecutor(RUNNING, thread_name_prefix="ed-esurge-speech")
        self._attempts: dict[int, float] = {}  # thread -> start of its attempt
        logger.info("%s: %s", model_name, self.describe())

    def describe(self) -> str:
        """Return a one-line summary: the format of the weights, and the limits."""
        return (
            f"{describe_dtypes(self.transcriber.model)}, {self.sampling_rate} samples per second, "
            f"up to {RUNNING} transcriptions at the same time"
        )

    def memory_bytes(self) -> int:
        """Return the bytes of the weights over all devices."""
        import jax
        from flax import nnx

        state = nnx.state(self.transcriber.model)
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))

    # ---- transcription

    @property
    def sampling_rate(self) -> int:
        """Samples of a second that the model reads."""
        return self.transcriber.sampling_rate

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that requests may name; empty without a choice."""
        return self.transcriber.languages

    async def transcribe(
        self,
        audio: bytes | np.ndarray,
        options: TranscriptionOptions,
        *,
        client: str = "",
        max_seconds: float = 3600.0,
        most: int = 32,
        on_start: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[Any]:
        """Yield the segments of a recording, and then the transcript.

        Closing the generator aborts the transcription before its next attempt.

        Args:
            audio: an audio file, or float32 samples of `sampling_rate`.
            options: options of the transcription.
            client: name of the client; clients take turns.
            max_seconds: maximum length of the recording.
            most: maximum number of running and waiting transcriptions.
            on_start: is called when the transcription leaves the queue.

        Yields:
            each `Segment` as soon as it is complete, and at the end the `Transcript`.

        Raises:
            AudioError: the file is no audio file, or too long.
            ConfigError: the model does not support an option.
            QueueFullError: there are too many transcriptions.
        """
        await self._places.enter(client, most)
        on_start()
        loop = asyncio.get_running_loop()
        result_queue: asyncio.Queue[Any] = asyncio.Queue()
        aborted, jobs = threading.Event(), JobGroup()

        def put(item: object) -> None:
            loop.call_soon_threadsafe(result_queue.put_nowait, item)

        def work() -> Any:
            samples = audio
            if isinstance(audio, bytes):
                samples = decode_audio(audio, self.sampling_rate, max_seconds, self._files, jobs)
            return self._transcribe_samples(samples, options, client, aborted, put)

        def finish_work(done: Future[Any]) -> None:
            if not loop.is_closed():  # a closed loop waits for nothing
                loop.call_soon_threadsafe(self._places.leave, client)
                put(done)

        try:
            running = self._threads.submit(work)
        except BaseException:
            self._places.leave(client)
            raise
        running.add_done_callback(finish_work)
        try:
            while not isinstance(item := await result_queue.get(), Future):
                yield item
            yield item.result()
        finally:
            aborted.set()
            jobs.cancel()

    def _transcribe_samples(
        self,
        samples: Any,
        options: TranscriptionOptions,
        client: str,
        aborted: threading.Event,
        on_segment: Callable[[Any], None],
    ) -> Any:
        me = threading.get_ident()

        def attempt() -> None:
            self._attempts.pop(me, None)
            if aborted.is_set():
                raise _AbortedError
            self._turns.yield_turn(client)
            if aborted.is_set():
                raise _AbortedError
            self._attempts[me] = time.monotonic()

        values: dict[str, Any] = {"language": options.language, "prompt": options.prompt or None}
        if options.task != "transcribe":
            values["task"] = options.task
        if "timestamps" in self.transcriber.options:
            values["timestamps"] = options.timestamps
        if options.word_timestamps:
            values["word_timestamps"] = True
        if options.temperature:
            values["temperature"] = options.temperature
        with self._turns.turn(client):
            try:
                return self.transcriber.transcribe(
                    samples,
                    seed=options.seed,
                    on_segment=on_segment,
                    on_attempt=attempt,
                    **{name: value for name, value in values.items() if value is not None},
                )
            except (_AbortedError, EasyDeLError):
                raise
            except Exception as error:
                logger.exception("a transcription failed")
                raise RuntimeError("the model failed on this recording") from error
            finally:
                self._attempts.pop(me, None)

    async def check(self) -> None:
        """Transcribe a short silence, in the turn of this engine's own client."""
        samples = np.zeros(int(SHORTEST * self.sampling_rate * 2), np.float32)
        async for _ in self.transcribe(samples, TranscriptionOptions(), client="check", most=2**31):
            pass

    def warm_up(self) -> None:
        """Compile the programs of greedy transcriptions, with and without times, and start the
        process that reads audio files."""
        self._files.start()
        samples = np.zeros(self.sampling_rate, np.float32)
        option_sets: tuple[dict[str, bool], ...] = ({"timestamps": False}, {"timestamps": True})
        for options in option_sets if "timestamps" in self.transcriber.options else ({},):
            self.transcriber.transcribe(samples, temperature=0.0, **options)

    # ---- the interface of engines

    @property
    def is_healthy(self) -> bool:
        """Whether no attempt exceeds `STUCK_SECONDS`."""
        now = time.monotonic()
        return all(now - start < STUCK_SECONDS for start in [*self._attempts.values()])

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the numbers of running and waiting transcriptions."""
        places = self._places
        return [
            {
                "num_requests_running": places.num_running,
                "num_requests_waiting": places.num_waiting,
            }
        ]

    def _refuse_request(self, feature: str) -> NoReturn:
        raise ConfigError(
            f"the model {self.model_name!r} transcribes audio and does not support {feature}: send "
            "files to /v1/audio/transcriptions"
        )

    def generate(
        self,
        prompt_token_ids: CheckedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Raise ConfigError: the model reads audio."""
        self._refuse_request("prompts of text")

    async def embed(
        self,
        prompt_token_ids: CheckedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Raise ConfigError: the model has no pooled vectors."""
        self._refuse_request("embeddings")

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Any]:
        """Raise ConfigError: transcripts have no grammar."""
        self._refuse_request("structured outputs")

    async def load_lora_adapter(self, name: str, source: Path) -> None:
        """Raise ConfigError: adapters are not supported."""
        self._refuse_request("LoRA adapters: merge the adapter first")

    async def unload_lora_adapter(self, name: str) -> None:
        """Raise ConfigError: adapters are not supported."""
        self._refuse_request("LoRA adapters")

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return no adapters."""
        return []

    async def reset_prefix_cache(self) -> None:
        """Do nothing: transcriptions share no prefixes."""

    async def sleep(self, level: int = 1) -> None:
        """Raise ConfigError: the model stays in memory."""
        self._refuse_request("sleep")

    async def wake_up(self) -> None:
        """Do nothing: the model never sleeps."""
