"""Options of one request: sampling or pooling. The names are vLLM's. Imports neither jax nor
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ed_infra.options import Options, Whole
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ed_esurge.repetition import RepetitionPenalty
from ed_esurge.thinking import ThinkingBudget, ThoughtTexts

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]
# Python code iterates over the lists of a request, so each list has a maximum length.
MAX_STOPS, MAX_BAD_WORDS, MAX_LISTED = 64, 1024, 2**18
Word = Annotated[str, Field(max_length=4096)]
#: Options that beam search follows, or that cannot change its result.
_OF_BEAMS = frozenset(
    (
        *("use_beam_search", "length_penalty", "n", "max_tokens", "temperature", "seed"),
        *("ignore_eos", "logprobs", "detokenize", "skip_special_tokens"),
    )
)

#: Option of vLLM without an effect here -> its values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "best_of": (None, 1),
    "guided_decoding": (None,),
}


class StructuredOutputs(Options):
    """The grammar of an output: exactly one of `json_schema`, `regex`, `choice` and `grammar`. The
    names are vLLM's."""

    json_schema: Annotated[str, Field(max_length=2**18)] | None = None
    """JSON schema, as JSON text. `{}` allows any JSON value."""
    regex: Annotated[str, Field(max_length=2**16)] | None = None
    choice: (
        Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None
    ) = Field(default=None, max_length=1024)
    """Allowed outputs: the completion is one of these strings."""
    grammar: Annotated[str, Field(max_length=2**16)] | None = None
    """Context-free grammar, in llguidance's variant of Lark's syntax or in GBNF."""
    after: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)
    ] = ()
    """Strings that end the reasoning of a model. The grammar applies after the first occurrence of
    one of them. Before, every token is allowed except end-of-sequence tokens."""
    calls: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=512)
    ] = ()
    """Strings that begin calls of functions, with a `json_schema`. An output that begins with one
    of them has any text."""

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        kinds = ("json_schema", "regex", "choice", "grammar")
        given_kinds = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given_kinds) != 1:
            raise ValueError(f"give one of {', '.join(kinds)} (got {given_kinds or 'none'})")
        if self.calls and self.json_schema is None:
            raise ValueError("calls need a json_schema: omit calls, or give a json_schema")
        return self


class SamplingParams(Options):
    """Sampling options of a request. Unknown names raise an error.

    The options apply to the logits in this order: `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, then `logit_bias`, masks (`allowed_token_ids`, `bad_words`, `min_tokens`),
    `temperature`, `top_n_sigma`, `top_k`, `typical_p`, `top_p` (over the tokens that top-k keeps),
    `min_p` and XTC. DRY adds to the biases. `mirostat` replaces the filters after the temperature.
    `logprobs_mode` selects the log-probabilities before or after all of these.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"guided_decoding": "structured_outputs"}
    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        "spaces_between_special_tokens": "omit it: the tokenizer decides",
        "truncate_prompt_tokens": "the option auto_truncate_prompt of the engine",
        "logits_processors": "logit_bias, allowed_token_ids, bad_words or structured_outputs",
        "extra_args": "omit it: this project has no counterpart",
        "flat_logprobs": "omit it: log-probabilities are mappings",
        "best_of": "n",
        "output_kind": "eSurge.stream for deltas",
    }

    n: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of completions per prompt. They share the pages of the prompt and have different
    seeds."""
    use_beam_search: bool = False
    """Whether the completions are the best beams of a beam search with `n` beams."""
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Exponent of the length, including the prompt, in the score of a beam."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Sampling temperature. 0 selects the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Number of most probable tokens to sample from. 0 or -1: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum probability of a sampled token, relative to that of the most probable token."""
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Mass of the tokens whose surprise is nearest to the entropy (arXiv:2202.00666). 1: all."""
    top_n_sigma: Annotated[float, Field(ge=-1, le=1e6)] = 0.0
    """Number of standard deviations below the largest logit (arXiv:2411.07641). 0 or -1: all
    tokens."""
    xtc_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a token is drawn without the top choices (XTC): the tokens with at least
    `xtc_threshold`, except the least probable of them."""
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] = 0.1
    dry_multiplier: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Penalty of a token that would continue a repetition of `dry_allowed_length` tokens (DRY). 0:
    no penalty."""
    dry_base: Annotated[float, Field(ge=1, le=1e6)] = 1.75
    """Factor of the penalty for each further repeated token."""
    dry_allowed_length: Annotated[int, Field(ge=1, lt=2**31)] = 2
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Number of last tokens that are searched for repetitions. -1: all; 0: no penalty."""
    dry_sequence_breakers: Annotated[tuple[Word, ...], Field(max_length=MAX_STOPS)] = (
        *("\n", ":", '"', "*"),
    )
    """Strings at which repetitions end. A token with one of them is part of no repetition."""
    dry_breaker_token_ids: Annotated[tuple[Whole, ...], Field(max_length=MAX_LISTED)] | None = None
    """Tokens at which repetitions end. None: the tokens with one of `dry_sequence_breakers`."""
    mirostat: Annotated[int, Field(ge=0, le=2)] = 0
    """Version of mirostat (arXiv:2007.14966), which controls the surprise of the sampled tokens.
    0: off. The control starts again if the engine preempts the request."""
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] = 5.0
    """Target surprise, in bits."""
    mirostat_eta: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate of the control."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of the sampler, any 64-bit integer, as in OpenAI's API. The same seed, prompt and
    options produce the same tokens in every batch. None: derived from the engine's seed and the
    arrival number of the request."""

    max_tokens: Whole | None = 16
    """Maximum number of generated tokens. None: the free part of the context. 0, with
    `prompt_logprobs`: only score the prompt."""
    min_tokens: Whole = 0
    """Minimum number of generated tokens before an end-of-sequence token, stop token or stop string
    may end the completion."""
    stop: Annotated[tuple[Word, ...], Field(max_length=MAX_STOPS)] = ()
    """Stop strings: one string or a list of strings."""
    stop_token_ids: Annotated[tuple[Whole, ...], Field(max_length=MAX_LISTED)] = ()
    ignore_eos: bool = False
    """Continue after end-of-sequence tokens."""
    include_stop_str_in_output: bool = False

    logprobs: Whole | None = None
    """Number of alternative tokens with log-probabilities per generated position. 0: only the
    sampled token. None: no log-probabilities."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Distribution of `logprobs`: that of the model (raw), or that of the sampler (processed). The
    names are those of vLLM's engine option. `prompt_logprobs` are raw in both modes."""
    prompt_logprobs: Whole | None = None
    """Number of alternative tokens with log-probabilities per prompt position. Such a request does
    not use the prefix cache."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Penalty for tokens of prompt and completion, as in Hugging Face (arXiv:1909.05858)."""
    logit_bias: Annotated[dict[Whole, Bias], Field(max_length=MAX_LISTED)] = Field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[tuple[Whole, ...], Field(max_length=MAX_LISTED)] | None = None
    """Token ids that may be sampled. None: all tokens."""
    bad_words: Annotated[tuple[Word, ...], Field(max_length=MAX_BAD_WORDS)] = ()
    """Strings that may not be generated, matched as tokens with and without a leading space."""

    forced_bos_token_id: Whole | None = None
    """Token after the start token of an encoder-decoder, such as the target language of a
    translation. The completion does not contain the token. None: that of the checkpoint."""

    thinking_budget: ThinkingBudget | None = None
    """Limit of the tokens of the thoughts at the beginning of the completion."""

    thought_texts: ThoughtTexts | None = None
    """Texts around thoughts, in which the strings of `stop` do not end the completion. None: stop
    strings apply to the whole text."""

    structured_outputs: StructuredOutputs | None = None
    """Grammar of the output. Only tokens that the grammar allows are sampled."""

    detokenize: bool = True
    """Decode tokens to text. False: outputs and log-probabilities have no text, and stop strings
    are not supported."""
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_values(cls, values: object) -> object:
        if not isinstance(values, dict) or not _NEUTRAL.keys() & values.keys():
            return values
        return {k: v for k, v in values.items() if k not in _NEUTRAL or v not in _NEUTRAL[k]}

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> Any:
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
    def _none_is_empty(cls, value: object, info: ValidationInfo) -> object:
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
        if self.use_beam_search:
            for name in self.without_effect_on_beams():
                raise ValueError(f"{name} has no effect on beam search: omit it")
        elif self.length_penalty != 1.0:
            raise ValueError("length_penalty requires use_beam_search=True")
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

    def without_effect_on_beams(self) -> list[str]:
        """Return the names of the given options that beam search does not follow."""
        default = SamplingParams()
        unsupported_names = [name for name in type(self).model_fields if name not in _OF_BEAMS]
        return [name for name in unsupported_names if getattr(self, name) != getattr(default, name)]

    @property
    def greedy(self) -> bool:
        """Whether sampling always selects the most probable token."""
        return self.temperature < 1e-5

    @property
    def filtered(self) -> bool:
        """Whether a filter needs the whole distribution; see `ed_esurge.runner.filters`."""
        return not self.greedy and bool(
            self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability or self.mirostat
        )

    @property
    def repetition_of_sequences(self) -> RepetitionPenalty | None:
        """The penalty for repetitions of several tokens (DRY); None = no penalty."""
        if not self.dry_multiplier or not self.dry_penalty_last_n:
            return None
        return RepetitionPenalty(
            self.dry_multiplier,
            self.dry_base,
            self.dry_allowed_length,
            None if self.dry_penalty_last_n < 0 else self.dry_penalty_last_n,
            frozenset(self.dry_breaker_token_ids or ()),
        )

    @property
    def penalized(self) -> bool:
        """Whether a penalty for previous tokens changes the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class PoolingParams(Options):
    """Options of a request that returns a pooled vector of the model's hidden states."""

    pooling: Literal["last", "mean"] = "last"
    """Hidden state after the last norm: that of the last token, or the mean over the prompt. The
    mean requires the hidden states of every token, so the request does not use the prefix cache."""
    normalize: bool = True
    """Scale the vector to unit length."""
    prompt_length: Whole = 0
    """Number of tokens of the prompt of an embedding model, such as `query: `, at the start. A
    checkpoint with `include_prompt: false` does not pool these tokens."""
    task: Literal["token_embed"] | None = None
    """"token_embed" returns the last hidden state of each token instead of one vector. Requires an
    embedding model. None: the pooled vector, or the logits of a classifier."""
    second_text_start: Whole | None = None
    """Index of the first token with the token type 1, for a pair of texts that a classifier reads.
    A classifier without token types, such as RoBERTa, does not use the index. None: one text."""
