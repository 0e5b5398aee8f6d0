"""Flags of vLLM and llama.cpp for `esurge serve`: what each means here. The pages in docs/migrate
are generated from this table.

A flag is translated into a flag of this program, or has no effect for a reason that is printed, or
is refused with the way out. Flags that this program has under the same name are not in the table,
unless a value differs.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ed_infra.errors import ConfigError

VLLM, LLAMA_CPP = "vLLM", "llama.cpp"
#: Flag that collects the values of several flags of llama.cpp.
_OVERRIDE = "--override-generation-config"
#: Key of `Context.meta` with the flags of another server that have no effect.
NOTES = "ed_esurge.notes"
_SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of another server.

    Attributes:
        program: the other server.
        names: its spellings, the most common first.
        target: the flag of this program; empty if there is none. `MODEL` is the argument.
        is_switch: whether the flag has no value; `value` is then that of `target`.
        value: the value of a switch.
        values: value of the flag -> value here; an empty text omits the flag.
        convert: value of the flag -> value here, or several, for values that are not in `values`.
            Raises ValueError.
        unless: flags that already say what this flag says.
        note: why the flag has no effect, if it has no target.
        refusal: what to write instead, for values that are neither in `values` nor have a target.
    """

    program: str
    names: tuple[str, ...]
    target: str = ""
    is_switch: bool = False
    value: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[str], str | list[str]] | None = None
    unless: tuple[str, ...] = ()
    note: str = ""
    refusal: str = ""


def _read_size(text: str) -> str:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    if match is None:
        return text
    return str(int(float(match[1]) * _SIZES[match[2]]))


def _read_list(text: str) -> list[str]:
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("a JSON list of texts")
    return values


def _convert_mib(text: str) -> str:
    return str(float(text) / 1024)


def _switch(program: str, names: str, note: str) -> ForeignFlag:
    return ForeignFlag(program, tuple(names.split()), is_switch=True, note=note)


def _idle(program: str, names: str, note: str) -> ForeignFlag:
    return ForeignFlag(program, tuple(names.split()), note=note)


def _refuse(program: str, names: str, refusal: str, *idle: str, note: str = "") -> ForeignFlag:
    values = dict.fromkeys(idle, "")
    note = note or ("is the behavior of this server" if idle else "")
    return ForeignFlag(program, tuple(names.split()), values=values, note=note, refusal=refusal)


def _refuse_switch(program: str, names: str, refusal: str) -> ForeignFlag:
    return ForeignFlag(program, tuple(names.split()), is_switch=True, refusal=refusal)


def _sample(names: str, option: str) -> ForeignFlag:
    """Return a flag of llama.cpp with a default of a sampling option."""
    return ForeignFlag(
        LLAMA_CPP,
        tuple(names.split()),
        _OVERRIDE,
        convert=lambda text: json.dumps({option: json.loads(text)}),
    )


_XLA = "has no meaning on JAX: XLA compiles all programs"
_ALWAYS = "is always on here"
_DEVICES = "the mesh decides: --tensor-parallel-size or --sharding-axis-dims"
_CONFIG = "set the field of the model's configuration with --config-kwargs"
_SEND = "send the option with each request"
_VLLM_FLAGS = (
    ForeignFlag(VLLM, ("--model",), "MODEL"),
    ForeignFlag(VLLM, ("--dtype",), "--dtype", values={"half": "float16", "float": "float32"}),
    ForeignFlag(VLLM, ("--max-model-len",), "--max-model-len", convert=_read_size),
    ForeignFlag(
        VLLM, ("--max-num-batched-tokens",), "--max-num-batched-tokens", convert=_read_size
    ),
    ForeignFlag(VLLM, ("--block-size",), "--page-size"),
    ForeignFlag(VLLM, ("--num-gpu-blocks-override",), "--num-pages"),
    ForeignFlag(
        VLLM, ("--kv-cache-memory-bytes",), refusal="use --num-pages, or --hbm-utilization"
    ),
    ForeignFlag(
        VLLM,
        ("--quantization", "-q"),
        "--quantization",
        values={"awq_marlin": "awq", "gptq_marlin": "gptq", "None": ""},
    ),
    ForeignFlag(VLLM, ("--hf-overrides",), "--config-kwargs"),
    ForeignFlag(VLLM, ("--tool-call-parser",), "--tool-parser-name"),
    ForeignFlag(
        VLLM,
        ("--reasoning-parser",),
        "--reasoning-parser",
        values={
            "deepseek_v4": "deepseek_v3",
            "holo2": "auto",
            "nano_v3": "nemotron_v3",
            "minimax_m2_append_think": "none",
        },
    ),
    ForeignFlag(
        VLLM,
        ("--chat-template-content-format",),
        values={"auto": "", "openai": ""},
        note="parts are used if the template requires them",
        refusal="use --no-oai-like-processor for texts",
    ),
    ForeignFlag(VLLM, ("--generation-config",), "--generation-config", values={"vllm": "none"}),
    ForeignFlag(VLLM, (_OVERRIDE,), _OVERRIDE),
    ForeignFlag(VLLM, ("--allowed-origins",), "--cors-origins", convert=_read_list),
    ForeignFlag(VLLM, ("--uvicorn-log-level",), "--log-level", values={"trace": "debug"}),
    ForeignFlag(
        VLLM,
        ("--enable-lora",),
        "--max-loras",
        is_switch=True,
        value="1",
        unless=("--max-loras", "--lora-modules"),
        note="the other flags of adapters say so",
    ),
    _idle(VLLM, "--swap-space", "vLLM removed it: --kv-offloading-size sets host memory for pages"),
    _switch(VLLM, "--enable-auto-tool-choice", "tools are always accepted"),
    _switch(VLLM, "--enable-reasoning", "reasoning is found in the chat template"),
    _switch(VLLM, "--enable-chunked-prefill --no-enable-chunked-prefill", _ALWAYS),
    _switch(VLLM, "--enable-prompt-tokens-details", _ALWAYS),
    _switch(VLLM, "--enable-server-load-tracking", "`GET /load` is always there"),
    _switch(VLLM, "--enable-tokenizer-info-endpoint", "`GET /tokenizer_info` is always there"),
    _switch(VLLM, "--enable-request-id-headers", "answers always have X-Request-Id"),
    _switch(VLLM, "--enforce-eager --no-enforce-eager", _XLA),
    _switch(
        VLLM,
        "--disable-log-requests --enable-log-requests --no-enable-log-requests",
        "the log has one line for each request and never its text: --log-level warning omits it",
    ),
    _switch(
        VLLM, "--disable-log-stats --disable-uvicorn-access-log", "use --log-level warning instead"
    ),
    _idle(VLLM, "--disable-access-log-for-endpoints --max-log-len", "the log has no such lines"),
    _switch(VLLM, "--disable-fastapi-docs", "the pages /docs and /redoc do not exist here"),
    _switch(VLLM, "--disable-custom-all-reduce", _XLA),
    _switch(VLLM, "--disable-hybrid-kv-cache-manager", "pools of pages follow the model"),
    _refuse_switch(VLLM, "--disable-sliding-window", "use --max-model-len below the window"),
    _switch(VLLM, "--use-v2-block-manager --multi-step-stream-outputs", "vLLM removed it"),
    _switch(VLLM, "--skip-mm-profiling --fully-sharded-loras --enable-lora-bias", _ALWAYS),
    _switch(VLLM, "--enable-dbo --enable-eplb --calculate-kv-scales", "is not needed here"),
    _idle(
        VLLM,
        "--compilation-config -cc -O --cuda-graph-sizes --cudagraph-capture-sizes "
        "--max-seq-len-to-capture --attention-backend --attention-config --model-impl "
        "--additional-config --kernel-config --worker-cls --worker-extension-cls",
        _XLA,
    ),
    _idle(
        VLLM,
        "--distributed-executor-backend --data-parallel-backend --max-parallel-loading-workers "
        "--ray-workers-use-nsight --all2all-backend",
        "replicas and processes of one model are started by this program",
    ),
    _idle(
        VLLM,
        "--prefix-caching-hash-algo --max-num-partial-prefills --max-long-partial-prefills "
        "--scheduler-delay-factor --preemption-mode --stream-interval",
        "the scheduler of this engine needs no such option",
    ),
    _idle(
        VLLM,
        "--max-cpu-loras --lora-extra-vocab-size --lora-dtype",
        "all loaded adapters stay on the device",
    ),
    _idle(
        VLLM,
        "--guided-decoding-backend --structured-outputs-config",
        "llguidance is the only backend of grammars",
    ),
    _idle(
        VLLM,
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-encoder-tp-mode "
        "--collect-detailed-traces --config-format --api-server-count --code-revision "
        "--ignore-patterns --model-loader-extra-config",
        "is not needed here",
    ),
    _refuse(
        VLLM,
        "--load-format",
        "the files of the checkpoint decide how it is read: omit the flag",
        *("auto", "safetensors", "gguf", "hf", "mistral", "fastsafetensors"),
        note="the files of the checkpoint decide how it is read",
    ),
    _refuse(VLLM, "--tokenizer-mode", "the tokenizer of the checkpoint is used", "auto", "hf"),
    _refuse(VLLM, "--tokenizer-revision", "name a folder with --tokenizer"),
    _refuse(
        VLLM,
        "--runner --task",
        "the checkpoint states the task of the model",
        *("auto", "generate", "pooling", "embed", "classify", "score", "reward", "embedding"),
        note="the checkpoint states the task of the model",
    ),
    _refuse(VLLM, "--convert", "save the checkpoint with the class of the task", "auto", "none"),
    _refuse(VLLM, "--response-role", "answers have the role assistant", "assistant"),
    _refuse(
        VLLM,
        "--device",
        "set the environment variable JAX_PLATFORMS=cpu, cuda or tpu",
        "auto",
        note="JAX selects the device",
    ),
    _refuse(
        VLLM,
        "--pipeline-parallel-size -pp",
        "layers are not split over stages: use --tensor-parallel-size, or --sharding-axis-dims",
        "1",
    ),
    _refuse_switch(
        VLLM,
        "--enable-expert-parallel -ep",
        "experts are split along the axis ep: --sharding-axis-dims 1,1,N,1,1",
    ),
    _refuse(VLLM, "--logprobs-mode", "send `logprobs_mode` with a request", "raw_logprobs"),
    _refuse(VLLM, "--cpu-offload-gb", "quantize the weights: --quantization", "0"),
    _refuse(VLLM, "--rope-scaling --rope-theta", _CONFIG),
    _refuse(
        VLLM, "--limit-mm-per-prompt", "the limits of bytes and --max-model-len apply to images"
    ),
    _refuse(VLLM, "--mm-processor-kwargs --media-io-kwargs", "edit preprocessor_config.json"),
    _refuse(
        VLLM, "--allowed-local-media-path", "send images as data: addresses; files are never read"
    ),
    _refuse(VLLM, "--default-chat-template-kwargs", "send chat_template_kwargs with a request"),
    _refuse_switch(
        VLLM, "--return-tokens-as-token-ids", "send return_tokens_as_token_ids with a request"
    ),
    _refuse_switch(
        VLLM, "--enable-force-include-usage", "send stream_options.include_usage with a request"
    ),
    _refuse_switch(
        VLLM, "--exclude-tools-when-tool-choice-none", "omit the tools from such a request"
    ),
    _refuse(VLLM, "--tool-parser-plugin --tool-server", "see docs/serving/tools.md: --mcp-config"),
    _refuse(VLLM, "--download-dir", "set the environment variable HF_HUB_CACHE"),
    _refuse(VLLM, "--hf-token", "set the environment variable HF_TOKEN"),
    _refuse(VLLM, "--uds --root-path --middleware", "put a proxy before the server"),
    _refuse(VLLM, "--ssl-ca-certs --ssl-ciphers", "put a proxy before the server"),
    _refuse(VLLM, "--ssl-cert-reqs", "put a proxy before the server", "0"),
    _refuse(VLLM, "--allowed-methods --allowed-headers", "--cors-origins allows them", '["*"]'),
    _refuse_switch(VLLM, "--allow-credentials", "clients of this server send keys, not cookies"),
    _refuse(VLLM, "--kv-transfer-config --kv-events-config", "one server computes both phases"),
    _refuse(VLLM, "--speculative-model --num-speculative-tokens", "use --speculative-config"),
    _refuse_switch(VLLM, "--headless", "use `esurge join`, or --node-rank"),
)
_CACHE_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"}
_LLAMA_CPP_FLAGS = (
    ForeignFlag(LLAMA_CPP, ("-m",), "MODEL"),
    ForeignFlag(
        LLAMA_CPP,
        ("-hf", "-hfr", "--hf-repo"),
        "MODEL",
    ),
    ForeignFlag(LLAMA_CPP, ("-a", "--alias"), "--served-model-name"),
    ForeignFlag(
        LLAMA_CPP,
        ("-c", "--ctx-size"),
        "--max-model-len",
        values={"0": ""},
        note="the limit is that of the model",
    ),
    ForeignFlag(LLAMA_CPP, ("-np", "--parallel"), "--max-num-seqs", values={"-1": ""}),
    ForeignFlag(LLAMA_CPP, ("-ub", "--ubatch-size"), "--max-num-batched-tokens"),
    ForeignFlag(LLAMA_CPP, ("-ctk", "--cache-type-k"), "--kv-cache-dtype", values=_CACHE_TYPES),
    ForeignFlag(
        LLAMA_CPP,
        ("-ctv", "--cache-type-v"),
        "--kv-cache-dtype",
        values=_CACHE_TYPES,
        unless=("-ctk", "--cache-type-k"),
        note="keys and values have one type",
    ),
    ForeignFlag(LLAMA_CPP, ("-s",), "--seed", values={"-1": ""}, note="each request has a seed"),
    ForeignFlag(
        LLAMA_CPP, ("--seed",), "--seed", values={"-1": ""}, note="each request has a seed"
    ),
    ForeignFlag(LLAMA_CPP, ("--chat-template-file",), "--chat-template"),
    ForeignFlag(
        LLAMA_CPP,
        ("--reasoning-format",),
        "--reasoning-parser",
        values={"none": "none", "auto": "auto", "deepseek": "auto", "deepseek-legacy": "auto"},
    ),
    ForeignFlag(
        LLAMA_CPP,
        ("-cram", "--cache-ram"),
        "--kv-offloading-size",
        values={"0": "", "-1": ""},
        convert=_convert_mib,
        note="--kv-offloading-size sets host memory for pages",
    ),
    ForeignFlag(LLAMA_CPP, ("--models-dir",), "--model-directory"),
    ForeignFlag(LLAMA_CPP, ("--ssl-key-file",), "--ssl-keyfile"),
    ForeignFlag(LLAMA_CPP, ("--ssl-cert-file",), "--ssl-certfile"),
    ForeignFlag(LLAMA_CPP, ("-v", "--log-verbose"), "--log-level", is_switch=True, value="debug"),
    ForeignFlag(
        LLAMA_CPP,
        ("-lv", "--verbosity", "--log-verbosity"),
        "--log-level",
        values={
            "0": "warning",
            "1": "error",
            "2": "warning",
            "3": "info",
            "4": "debug",
            "5": "debug",
        },
    ),
    ForeignFlag(
        LLAMA_CPP,
        ("-md", "--model-draft", "--spec-draft-model"),
        "--speculative-config",
        convert=lambda path: json.dumps({"method": "draft_model", "model": path}),
    ),
    _sample("--temp --temperature", "temperature"),
    _sample("--top-k", "top_k"),
    _sample("--top-p", "top_p"),
    _sample("--min-p", "min_p"),
    _sample("--repeat-penalty", "repetition_penalty"),
    _sample("--presence-penalty", "presence_penalty"),
    _sample("--frequency-penalty", "frequency_penalty"),
    _switch(LLAMA_CPP, "--jinja", "chats always use the template of the model"),
    _switch(LLAMA_CPP, "-cb --cont-batching -nocb --no-cont-batching", _ALWAYS),
    _switch(
        LLAMA_CPP, "--metrics --slots --no-slots", "`GET /metrics` and `/slots` are always there"
    ),
    _switch(LLAMA_CPP, "--cache-prompt", "is on: --no-enable-prefix-caching turns it off"),
    ForeignFlag(
        LLAMA_CPP,
        ("--no-cache-prompt",),
        "--no-enable-prefix-caching",
        is_switch=True,
    ),
    _switch(LLAMA_CPP, "--embedding --embeddings", "the checkpoint states the task of the model"),
    _switch(LLAMA_CPP, "--rerank --reranking", "the checkpoint states the task of the model"),
    _switch(
        LLAMA_CPP,
        "--mlock --no-mmap --mmap --no-warmup --warmup --repack -nr --no-repack --no-host --perf "
        "--no-perf -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload "
        "-dio --direct-io",
        "weights and pages are in the memory of the device",
    ),
    _switch(
        LLAMA_CPP, "--swa-full -kvu --kv-unified -no-kvu", "all sequences share one pool of pages"
    ),
    _switch(LLAMA_CPP, "--no-context-shift", "a full context ends the answer"),
    _refuse_switch(
        LLAMA_CPP,
        "--context-shift",
        "a full context ends the answer: --auto-truncate-prompt shortens prompts",
    ),
    _switch(LLAMA_CPP, "--offline", "directories are never looked up on a hub"),
    _switch(
        LLAMA_CPP,
        "--log-timestamps --no-log-timestamps --log-prefix --no-log-prefix -e --escape --no-escape "
        "--no-ui --no-webui --log-disable",
        "has no counterpart here",
    ),
    _switch(LLAMA_CPP, "-cmoe --cpu-moe --check-tensors", "is not needed here"),
    _idle(
        LLAMA_CPP,
        "-ngl --gpu-layers --n-gpu-layers -ncmoe --n-cpu-moe -dev -sm --split-mode "
        "-ts --tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx",
        f"all layers are on the devices of JAX, and {_DEVICES}",
    ),
    _idle(LLAMA_CPP, "-fa --flash-attn", "attention never stores all scores"),
    _idle(
        LLAMA_CPP,
        "-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --prio --poll --numa "
        "--cpu-strict",
        "all processors of the process are used: taskset or numactl limit them",
    ),
    _idle(LLAMA_CPP, "--threads-http --log-colors", "has no counterpart here"),
    _idle(LLAMA_CPP, "-b --batch-size --keep -dt --defrag-thold", "-ub is the size of a step"),
    _idle(
        LLAMA_CPP,
        "--cache-reuse -sps --slot-prompt-similarity -ctxcp --ctx-checkpoints",
        "prefixes are found by their pages",
    ),
    _refuse(LLAMA_CPP, "-n --predict --n-predict", "send max_tokens with a request", "-1"),
    _refuse(LLAMA_CPP, "-mu --model-url -dr --docker-repo", "download the file, and name it"),
    _refuse(LLAMA_CPP, "-hff --hf-file", "download the file, and name it as MODEL"),
    _refuse(LLAMA_CPP, "-hft", "set the environment variable HF_TOKEN"),
    _refuse(
        LLAMA_CPP,
        "-mm --mmproj -mmu --mmproj-url",
        "serve the checkpoint in safetensors, which has the tower of images",
    ),
    _refuse(
        LLAMA_CPP, "--lora --lora-scaled", "use --lora-modules NAME=PATH with a folder of PEFT"
    ),
    _refuse(LLAMA_CPP, "--pooling", "the checkpoint states how vectors are pooled"),
    _refuse(
        LLAMA_CPP,
        "--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
        "--yarn-ext-factor --yarn-attn-factor --override-kv",
        _CONFIG,
    ),
    _refuse(
        LLAMA_CPP,
        "--samplers --sampler-seq --dry-multiplier --mirostat --xtc-probability --typical "
        "--typical-p --repeat-last-n -l --logit-bias --grammar --grammar-file -j --json-schema",
        _SEND,
    ),
    _refuse(LLAMA_CPP, "--reasoning-budget", "send thinking_token_budget", "-1"),
    _refuse(LLAMA_CPP, "-to --timeout", 'use --limits {"body_timeout": SECONDS}'),
    _refuse(LLAMA_CPP, "--slot-save-path", "use --prefix-cache-directory"),
    _refuse(LLAMA_CPP, "--path --api-prefix --log-file", "put a proxy before the server"),
    _refuse(
        LLAMA_CPP,
        "--draft --draft-max --draft-n --draft-min --spec-type --spec-draft-n-max",
        '--speculative-config {"method": "ngram", "num_speculative_tokens": N}',
    ),
)
FOREIGN_FLAGS = (*_VLLM_FLAGS, *_LLAMA_CPP_FLAGS)


_TABLE = {name: flag for flag in FOREIGN_FLAGS for name in flag.names}


@dataclass
class TranslatedWords:
    """A command line in the flags of this program.

    Attributes:
        models: models that flags name.
        flags: each flag with its values, and each word that is not translated.
        notes: flags without an effect, each with its reason.
    """

    models: list[str] = field(default_factory=list)
    flags: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command line."""
        return [*self.models, *chain.from_iterable(self.flags)]


def translate_flags(words: Sequence[str]) -> TranslatedWords:
    """Replace flags of vLLM and llama.cpp by those of this program.

    Args:
        words: the words of a command line. Flags that are not in the table stay as they are, with
            dashes for underscores.

    Raises:
        ConfigError: a flag is refused, or its value has no counterpart.
    """
    return _translate(words, {word.partition("=")[0] for word in words})


def translate_entries(
    values: Mapping[object, object],
) -> tuple[dict[object, object], list[str]]:
    """Replace flags of vLLM and llama.cpp in a file of flags by those of this program.

    Args:
        values: flag without leading dashes -> its value; a flag without a value is true or false.

    Returns:
        The entries here, and the flags without an effect, each with its reason.

    Raises:
        ConfigError: a flag is refused, or its value has no counterpart.
    """
    entries: dict[object, object] = {}
    words: list[str] = []
    for key, value in values.items():
        name = f"--{str(key).replace('_', '-')}"
        flag = _TABLE.get(name)
        if flag is None:
            entries[key] = value
        elif not flag.is_switch:
            words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        elif not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        elif value:
            words.append(name)
    translated = _translate(words, {f"--{str(key).replace('_', '-')}" for key in values})
    if translated.models:
        raise ConfigError("model is no flag here: name the model on the command line")
    for name, *texts in translated.flags:
        entries[name.removeprefix("--")] = texts if len(texts) > 1 else texts[0] if texts else True
    return entries, translated.notes


def _translate(words: Sequence[str], given_flags: Collection[str]) -> TranslatedWords:
    result = TranslatedWords()
    overrides: dict[str, object] = {}
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        if word == "--":
            result.flags.append((word, *remaining))
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        flag = _TABLE.get(name)
        if flag is None or not (flag.is_switch or equals or remaining):
            result.flags.append((f"{name}{equals}{value}",))  # the parser reports a missing value
            continue
        if flag.is_switch:
            value = flag.value
        elif not equals:
            value = remaining.popleft()
        is_said = not set(flag.unless).isdisjoint(given_flags)
        converted = None if is_said else _convert(flag, name, value)
        if converted is None:
            result.notes.append(f"{name} ({flag.note})")
        elif flag.target == "MODEL":
            result.models += converted
        elif flag.target == _OVERRIDE:
            overrides |= parse_mapping(converted[0], name)
        else:
            result.flags.append((flag.target, *filter(None, converted)))
    if overrides:
        result.flags.append((_OVERRIDE, json.dumps(overrides)))
    return result


def parse_mapping(text: str | None, flag: str) -> Mapping[str, Any]:
    """Return a mapping from JSON text; empty without a text.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is a JSON object, and cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is a JSON object, not {text!r}")
    return value


def _convert(flag: ForeignFlag, name: str, value: str) -> list[str] | None:
    """Return the values here; None if the flag has no effect."""
    if value in flag.values:
        return [flag.values[value]] if flag.values[value] else None
    if flag.target:
        try:
            converted = value if flag.convert is None else flag.convert(value)
            return converted if isinstance(converted, list) else [converted]
        except ValueError:
            raise ConfigError(
                f"{name} {value!r:.100} of {flag.program} cannot be read: see {flag.target}"
            ) from None
    if flag.refusal:
        text = name if flag.is_switch else f"{name} {value!r:.100}"
        raise ConfigError(f"{text} of {flag.program} has no counterpart here: {flag.refusal}")
    return None
