"""Options of the actions of a run file. This module imports neither jax nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypedDict

from ed_data.languages import language_code
from ed_esurge.server.options import ServerOptions
from ed_infra.chats import CheckedPrompts
from ed_infra.options import Count, Options, Seed, choice
from pydantic import AfterValidator, BeforeValidator, Field

from ed_elarge.config.sections import (
    EvalSection,
    Name,
    Probability,
    Temperature,
)


class NoOptions(Options):
    """Options of actions without parameters."""


class WriteOptions(Options):
    """`to_json`, `to_yaml`."""

    path: Name
    """Path of the file; its folder is created."""


class EvalOptions(EvalSection):
    """`eval`: these keys override the section `eval`."""

    engine: Annotated[str, choice("engine", ("auto", "esurge"))] = "auto"
    """The engine; `auto` selects `esurge`."""

    def over(self, section: EvalSection) -> EvalSection:
        """Return the section with the keys of this action."""
        changes = {key: getattr(self, key) for key in self.model_fields_set - {"engine"}}
        return section.replace(**changes)


class BenchmarkConfig(TypedDict, total=False):
    """A benchmark in the spelling of EasyDeL: an item of `trainer.benchmarks`.

    Further keys are those of the section `eval`. All benchmarks of a run have the same options.
    """

    name: str
    tasks: str | list[str]
    num_fewshot: int
    batch_size: int
    max_new_tokens: int
    temperature: float


def _one_or_more(value: object) -> Any:
    return (value,) if isinstance(value, str) else value


class GenerateOptions(Options):
    """`generate`: print completions."""

    ALIASES: ClassVar[Mapping[str, str]] = {"prompt": "prompts", "max_tokens": "max_new_tokens"}

    prompts: Annotated[CheckedPrompts, Field(min_length=1)] | None = None
    """Texts to continue, and conversations to answer (lists of messages with `role` and `content`).
    None: the beginning of a held-out text or chat, or "The"."""
    max_new_tokens: Count = 64
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Sample from this number of the likeliest tokens; 0 and -1: from all tokens."""
    top_p: Probability = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this value."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Values above 1 reduce the probability of tokens that have occurred."""
    seed: Seed = 0


class TranscribeOptions(Options):
    """`transcribe`: print the texts of recordings, of any length."""

    files: Annotated[tuple[Name, ...], Field(min_length=1), BeforeValidator(_one_or_more)]
    """Paths of recordings: WAV, FLAC, OGG, MP3."""
    language: Annotated[str, AfterValidator(language_code)] | None = None
    """Language of the speech: a code, or an English name. None: the model detects the language.
    Whisper only."""
    task: Annotated[str, choice("task", ("transcribe", "translate"))] = "transcribe"
    """`translate` translates to English. Whisper only."""


class ServeOptions(ServerOptions):
    """`serve`: the OpenAI-compatible server, until it is interrupted."""
