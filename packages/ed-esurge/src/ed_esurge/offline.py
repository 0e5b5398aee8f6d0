"""`LLM`: the engine of a script, with the names of vLLM's offline interface.

The options of `LLM` are the flags of `vllm serve` in Python's spelling. They are read as
`esurge serve` reads its flags, by the table of `ed_esurge.command.foreign_flags`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger

from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge
    from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)

#: A prompt of vLLM: a text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
_Prompt = str | Sequence[int] | Mapping[str, object]
_Params = SamplingParams | Sequence[SamplingParams]
_Conversation = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of a request; the engine loads it at the first use.

    Attributes:
        lora_name: name of the adapter.
        lora_int_id: number of the adapter in vLLM; this engine identifies adapters by their names.
        lora_path: folder in PEFT's layout.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class StructuredOutputsParams:
    """vLLM's grammar of an output: one of `json`, `regex`, `choice`, `grammar`, `json_object`.

    A call returns `StructuredOutputs`. `json` is a schema: a mapping, a text, or a class of
    pydantic.

    Raises:
        ConfigError: a field is unknown, or has no counterpart here.
    """

    def __new__(cls, **fields: object) -> StructuredOutputs:
        """Return the grammar."""
        from pydantic import ValidationError

        from ed_esurge.server.generation.structured import StructuredOutputsField

        schema = fields.get("json")
        get_schema = getattr(schema, "model_json_schema", None)
        if get_schema is not None:
            fields["json"] = get_schema()
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            outputs = StructuredOutputsField.model_validate(given).outputs()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"StructuredOutputsParams: {place}: {first['msg']}") from None
        return next(iter(outputs.values()))


@dataclass(frozen=True)
class PooledValue:
    """A value of a prompt; the attribute of its task has the value.

    Attributes:
        data: the value: a vector, the vectors of all tokens, or probabilities.
    """

    data: np.ndarray

    @property
    def embedding(self) -> list[float]:
        """The vector of `LLM.embed`."""
        return self.data.tolist()

    @property
    def probs(self) -> list[float]:
        """The probabilities of `LLM.classify`."""
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        """Number of labels of `LLM.classify`."""
        return len(self.data)

    @property
    def hidden_size(self) -> int:
        """Number of values of the vector."""
        return self.data.shape[-1]

    @property
    def score(self) -> float:
        """The score of `LLM.score`."""
        return float(self.data)


@dataclass(frozen=True)
class PooledOutput:
    """The output of `embed`, `encode`, `classify` or `score` for one prompt.

    Attributes:
        request_id: id of the request.
        outputs: the value.
        prompt_token_ids: tokens of the prompt.
        finished: whether the output is complete.
    """

    request_id: str
    outputs: PooledValue
    prompt_token_ids: list[int]
    finished: bool = True


class LLM:
    """A model for a script, with the names of vLLM.

    Programs are compiled at their first use, unless `compile_runner` is true.

    Args:
        model: a folder, a GGUF file, `package:NAME/FILE` or a hub id.
        options: flags of `vllm serve` or `esurge serve`, such as `max_model_len`,
            `gpu_memory_utilization`, `dtype`, `quantization`, `tensor_parallel_size`,
            `enable_prefix_caching`, `enable_lora`, `seed` and `speculative_config`. None is an
            option that is not given.

    Attributes:
        notes: the options without an effect, each with its reason.
        llm_engine: the engine.

    Raises:
        ConfigError: an option is unknown, invalid or has no counterpart.

    Example:
        >>> llm = LLM(model="runs/quickstart/model", max_model_len=256)
        >>> llm.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str | Path, **options: object) -> None:
        from ed_esurge.command.load import create_engine, parse_model_arguments

        self._defaults = _read_defaults(options)
        words, self.notes = list_words(options)
        for note in self.notes:
            logger.info("LLM: %s", note)
        try:
            arguments = parse_model_arguments([str(model), *words])
        except Exception as error:
            # The class of errors of words is typer's own, without a public name.
            describe = getattr(error, "format_message", None)
            if describe is None:
                raise
            raise ConfigError(f"LLM: {describe()}") from None
        if not {"compile_runner", "compile_in_background"} & options.keys():
            engine = arguments.engine.replace(compile_runner=False)
            arguments = arguments.replace(engine=engine)
        self.llm_engine: eSurge = create_engine(arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.llm_engine.terminate()

    # Texts.

    def generate(
        self,
        prompts: _Prompt | Sequence[_Prompt] | None = None,
        sampling_params: _Params | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch.

        Args:
            prompts: one prompt or several: texts, token ids, or mappings with `prompt` or
                `prompt_token_ids`.
            sampling_params: options for all prompts, or for each prompt. None: the defaults of the
                model, see `get_default_sampling_params`.
            use_tqdm: whether to show a progress bar on a terminal.
            lora_request: the adapter for all prompts, or for each prompt.
            prompt_token_ids: prompts of token ids; the name of earlier versions.

        Returns:
            one output per prompt, in the order of the prompts.

        Raises:
            ConfigError: a prompt or an option is invalid.
        """
        given = prompt_token_ids if prompts is None else prompts
        if given is None:
            raise ConfigError("LLM.generate completes prompts: pass prompts")
        texts = _read_prompts(given)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        names = self._load_adapters(lora_request, len(texts))
        return self.llm_engine.generate(texts, sampling_params, lora_name=names, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: _Conversation | Sequence[_Conversation],
        sampling_params: _Params | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several conversations.

        Args:
            messages: a list of messages, or a list of such lists.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            lora_request: see `generate`.
            chat_template: Jinja text that replaces the template of the tokenizer.
            chat_template_content_format: `auto`; `openai` and `string` select the form of contents.
            add_generation_prompt: whether the prompt ends with the beginning of an answer.
            continue_final_message: whether the answer continues the last message.
            tools: functions in OpenAI's form.
            chat_template_kwargs: variables of the template.

        Raises:
            ConfigError: the tokenizer has no chat template, or an option is unknown.
        """
        from ed_esurge.template import ChatTemplate

        if chat_template_content_format not in ("auto", "openai", "string"):
            raise ConfigError(
                f"chat_template_content_format={chat_template_content_format!r} is none of auto, "
                "openai and string"
            )
        form = {"auto": None, "openai": True, "string": False}[chat_template_content_format]
        template = ChatTemplate(self.llm_engine.tokenizer, chat_template, reads_parts=form)
        options = dict(chat_template_kwargs or {})
        options |= {"tools": list(tools)} if tools else {}
        options |= {"continue_final_message": True} if continue_final_message else {}
        options["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        template.check_options(options)
        conversations: list[_Conversation]
        if len(messages) and isinstance(messages[0], Mapping):
            conversations = [cast("_Conversation", messages)]
        else:
            conversations = list(cast("Sequence[_Conversation]", messages))
        prompts = [template.token_ids(one, **options) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    # Vectors and classes.

    def embed(
        self,
        prompts: _Prompt | Sequence[_Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """Return a vector of each prompt: `outputs.embedding`.

        Args:
            prompts: see `generate`.
            pooling_params: options for all prompts, or for each prompt.
            use_tqdm: see `generate`.
            lora_request: see `generate`.
        """
        texts = _read_prompts(prompts)
        (name, *_) = self._load_adapters(lora_request, len(texts)) or [None]
        outputs = self.llm_engine.embed(texts, pooling_params, lora_name=name, use_tqdm=use_tqdm)
        return [_build_output(output, _get_vector(output)) for output in outputs]

    def encode(
        self,
        prompts: _Prompt | Sequence[_Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str = "embed",
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """Return the data of a task for each prompt: `outputs.data`.

        Args:
            prompts: see `generate`.
            pooling_params: options of `embed` and `token_embed`.
            pooling_task: `embed`, `token_embed` or `classify`.
            use_tqdm: see `generate`.
            lora_request: see `generate`.

        Raises:
            ConfigError: the task is unknown.
        """
        if pooling_task == "classify":
            return self.classify(prompts, use_tqdm=use_tqdm)
        if pooling_task not in ("embed", "token_embed"):
            raise ConfigError(
                f"pooling_task={pooling_task!r} is none of embed, token_embed and classify"
            )
        params = pooling_params or PoolingParams()
        if pooling_task == "token_embed":
            params = params.replace(task="token_embed")
        return self.embed(
            prompts, pooling_params=params, use_tqdm=use_tqdm, lora_request=lora_request
        )

    def classify(
        self, prompts: _Prompt | Sequence[_Prompt], *, use_tqdm: bool = True
    ) -> list[PooledOutput]:
        """Return the probabilities of the labels of each prompt: `outputs.probs`.

        Raises:
            ConfigError: the model is no classifier.
        """
        labels = self.llm_engine.facts.labels
        if labels is None:
            raise ConfigError("LLM.classify needs a classifier, and the model has no labels")
        texts = _read_prompts(prompts)
        params = PoolingParams(normalize=False)
        outputs = self.llm_engine.embed(texts, params, use_tqdm=use_tqdm)
        probabilities = labels.probabilities(np.stack([_get_vector(one) for one in outputs]))
        return [_build_output(one, row) for one, row in zip(outputs, probabilities, strict=True)]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[PooledOutput]:
        """Return the score of each pair of texts: `outputs.score`.

        A classifier with one label reads both texts. Vectors of other models are compared.

        Args:
            data_1: one text, or as many as `data_2` has.
            data_2: the other texts.
            use_tqdm: see `generate`.

        Raises:
            ConfigError: the numbers of texts do not match, or the model has several labels.
        """
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) not in (1, len(second)):
            raise ConfigError(
                f"data_1 has {len(first)} texts, and data_2 has {len(second)}: pass one text, or "
                "as many as data_2 has"
            )
        facts = self.llm_engine.facts
        if facts.labels is not None:
            return self._score_pairs(first, second, use_tqdm)
        settings = facts.embedding_settings
        cosine = settings is None or settings.similarity_fn_name == "cosine"
        prefix = "" if settings is None else settings.prompt()
        params = PoolingParams(normalize=cosine)
        texts = [prefix + text for text in (*first, *second)]
        outputs = self.llm_engine.embed(texts, params, use_tqdm=use_tqdm)
        left, right = outputs[: len(first)], outputs[len(first) :]
        left = left * len(right) if len(left) == 1 else left
        return [
            _build_output(two, np.asarray(_get_vector(one) @ _get_vector(two)))
            for one, two in zip(left, right, strict=True)
        ]

    def _score_pairs(
        self, first: list[str], second: list[str], use_tqdm: bool
    ) -> list[PooledOutput]:
        from ed_esurge.server.generation.text_pairs import encode_pair

        labels, tokenizer = self.llm_engine.facts.labels, self.llm_engine.tokenizer
        if labels is None or tokenizer is None or len(labels.names) != 1:
            raise ConfigError("LLM.score needs a classifier with one label, or an embedding model")
        first = first * len(second) if len(first) == 1 else first
        pairs = [
            encode_pair(tokenizer, one, two, None, None)
            for one, two in zip(first, second, strict=True)
        ]
        params = [PoolingParams(normalize=False, second_text_start=start) for _, start, _ in pairs]
        outputs = self.llm_engine.embed([ids for ids, _, _ in pairs], params, use_tqdm=use_tqdm)
        scores = labels.scores(np.stack([_get_vector(one) for one in outputs]))
        return [
            _build_output(one, np.asarray(score))
            for one, score in zip(outputs, scores, strict=True)
        ]

    # The engine.

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ConfigError: the model has none.
        """
        if self.llm_engine.tokenizer is None:
            raise ConfigError("the model has no tokenizer")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling options of generation_config.json, and of the options of `LLM`."""
        stored = self.llm_engine.facts.sampling_defaults.values
        overrides = {k: v for k, v in self._defaults.items() if k != "generation_config"}
        uses_stored = self._defaults["generation_config"] in ("auto", None)
        values = {**(stored if uses_stored else {}), **overrides}
        return SamplingParams.model_validate(values)

    def reset_prefix_cache(self) -> None:
        """Free the pages of the prefix cache."""
        self.llm_engine.reset_prefix_cache()

    def _load_adapters(
        self, requests: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[str | None]:
        """Load the adapters of requests, and return their names."""
        if requests is None or isinstance(requests, LoRARequest):
            given = [requests] * count
        else:
            given = list(requests)
        adapters = {one.lora_name: one for one in given if one is not None}
        engine = self.llm_engine
        loaded = [one.name for one in engine.list_lora_adapters()]
        for name, request in adapters.items():
            if name in loaded:
                continue
            if not engine.config.max_loras:
                raise ConfigError(
                    "lora_request needs an engine with adapters: LLM(enable_lora=True)"
                )
            unused = [one for one in loaded if one not in adapters]
            if len(loaded) >= engine.config.max_loras and unused:
                engine.unload_lora_adapter(unused[0])
                loaded.remove(unused[0])
            engine.load_lora_adapter(name, request.lora_path)
            loaded.append(name)
        return [None if one is None else one.lora_name for one in given]


def list_words(options: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the words of a command line for options of `LLM`, and the options without an effect.

    Args:
        options: names of flags with underscores -> values.

    Raises:
        ConfigError: an option has no counterpart here.
    """
    from ed_esurge.command.foreign_flags import translate_entries

    given: dict[object, object] = {}
    for name, value in options.items():
        if value is not None:
            given[name] = str(value).rpartition(".")[2] if name == "dtype" else value
    entries, notes = translate_entries(given)
    words: list[str] = []
    for name, value in entries.items():
        flag = f"--{str(name).replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [f"{flag}={','.join(map(str, value))}"]
        else:
            words.append(f"{flag}={value if isinstance(value, str) else json.dumps(value)}")
    return words, notes


def _read_defaults(options: dict[str, object]) -> dict[str, object]:
    """Remove the options about defaults of sampling, and return them."""
    defaults: dict[str, object] = {}
    source = options.pop("generation_config", None)
    if source not in (None, "auto", "vllm", "none"):
        raise ConfigError(f"generation_config={source!r} is none of auto and vllm")
    defaults["generation_config"] = source
    overrides = options.pop("override_generation_config", None)
    if isinstance(overrides, Mapping):
        defaults |= overrides
    elif overrides is not None:
        raise ConfigError("override_generation_config is a mapping of sampling options")
    return defaults


def _read_prompts(prompts: object) -> list[str | Sequence[int]]:
    """Return prompts of vLLM as texts or token ids."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    many = list(cast("Sequence[object]", prompts))
    if many and all(isinstance(one, int) for one in many):
        many = [many]
    return [_read_prompt(one) for one in many]


def _read_prompt(prompt: object) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return cast("str | Sequence[int]", prompt)
    unknown = [
        name
        for name, value in prompt.items()
        if name not in ("prompt", "prompt_token_ids") and value is not None
    ]
    if unknown:
        raise ConfigError(
            f"a prompt with {', '.join(map(str, unknown))} needs the server: send images and "
            "embeddings to /v1/chat/completions and /v1/completions"
        )
    value = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(value, str | Sequence):
        raise ConfigError("a prompt is a text, or has prompt or prompt_token_ids")
    return value


def _get_vector(output: RequestOutput) -> np.ndarray:
    if output.pooled is None:
        raise ConfigError(f"request {output.request_id} returned no vector: {output.error}")
    return output.pooled


def _build_output(output: RequestOutput, data: np.ndarray) -> PooledOutput:
    return PooledOutput(output.request_id, PooledValue(data), output.prompt_token_ids)
