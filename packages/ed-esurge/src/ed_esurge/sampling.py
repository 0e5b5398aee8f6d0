"""What one request wants, sampled tokens or a pooled vector: vLLM's names. Imports neither jax nor
transformers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ed_infra.options import Options
from pydantic import Field, field_validator, model_validator

# Numbers go to the device in 32 bits.
Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Count
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]
# A request's lists are walked in Python, so each has a length.
MAX_STOPS, MAX_BAD_WORDS, MAX_LISTED = 64, 1024, 2**18
Word = Annotated[str, Field(max_length=4096)]


class StructuredOutputs(Options):
    """What an output must be, by a grammar: one of the first four. The names are vLLM's."""

    json_schema: Annotated[str, Field(max_length=2**18)] | None = None
    """JSON schema, as JSON text; `{}` is any JSON."""
    regex: Annotated[str, Field(max_length=2**16)] | None = None
    choice: (
        Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None
    ) = Field(default=None, max_length=1024)
    """One of these texts."""
    grammar: Annotated[str, Field(max_length=2**16)] | None = None
    """In Lark's syntax as llguidance has it, or GBNF."""
    after: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)
    ] = ()
    """Texts that end a model's thoughts. The grammar begins behind the first of them that appears;
    before, every token is allowed but those that end the sequence."""

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        kinds = ("json_schema", "regex", "choice", "grammar")
        wanted = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(wanted) != 1:
            raise ValueError(f"give one of {', '.join(kinds)} (got {wanted or 'none'})")
        return self


class SamplingParams(Options):
    """Sampling options of a request; each has an effect, unknown names are refused.

    The order on the logits is: `repetition_penalty`, `frequency_penalty` and `presence_penalty`,
    then `logit_bias`, masks (`allowed_token_ids`, `bad_words`, `min_tokens`), `temperature`,
    `top_k`, `top_p` (over what top-k left) and `min_p`. `logprobs_mode` says whether reported
    log-probabilities are those before or after all of these.
    """

    n: Annotated[int, Field(ge=1, le=4096)] = 1
    """Completions per prompt. They share the prompt's pages and differ in their seeds."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """0 or -1: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest probability, relative to the most probable token's, that may be sampled."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Same seed, prompt and options give the same tokens, whatever else is in the batch. Any number
    of 64 bits, as in OpenAI's API. None: drawn from the engine's seed and the request's arrival
    number."""

    max_tokens: Count | None = 16
    """None: as many as the context holds. 0, with `prompt_logprobs`: only score the prompt."""
    min_tokens: Count = 0
    """No end of sequence, stop token or stop string before so many tokens."""
    stop: Annotated[tuple[Word, ...], Field(max_length=MAX_STOPS)] = ()
    """Strings that end the completion; a single string is accepted."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED)] = ()
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False

    logprobs: Count | None = None
    """Alternatives per generated position (0: the chosen token alone)."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Distribution of `logprobs`: the model's, or the one that tokens are sampled from. The names
    are those of vLLM's engine option. `prompt_logprobs` are the model's in both modes."""
    prompt_logprobs: Count | None = None
    """The same for prompt positions. Such a request does not read the prefix cache."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Over prompt and completion, as in Hugging Face (arXiv:1909.05858)."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_LISTED)] = Field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_LISTED)] | None = None
    """Sample from these alone."""
    bad_words: Annotated[tuple[Word, ...], Field(max_length=MAX_BAD_WORDS)] = ()
    """Strings that may not be generated (as their tokens, with and without a leading space)."""

    structured_outputs: StructuredOutputs | None = None
    """The output follows a grammar; tokens that it forbids are not sampled."""

    detokenize: bool = True
    """False: no text (of log-probabilities neither), and no stop strings."""
    skip_special_tokens: bool = True

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty string is in every text: leave it out")
        return value

    @field_validator("stop_token_ids", "logit_bias", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any, info: Any) -> Any:
        if value is None:
            return {} if info.field_name == "logit_bias" else ()
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens 0 gives nothing: it needs prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it"
            )
        if not self.detokenize and self.stop:
            raise ValueError("stop strings need text: drop stop, or detokenize=False")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: nothing could be sampled; use None")
        if self.structured_outputs is not None:
            for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} could forbid all that the grammar of structured_outputs allows: "
                        "drop one of the two"
                    )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < 1e-5

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on which tokens came before (through a penalty)."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class PoolingParams(Options):
    """Options of a request for one vector instead of tokens: the model's hidden states, pooled."""

    pooling: Literal["last", "mean"] = "last"
    """Which hidden states, after the last norm: that of the last token, or the mean over the
    prompt. A mean needs every token computed, so it does not read the prefix cache."""
    normalize: bool = True
    """Scale the vector to length 1."""
