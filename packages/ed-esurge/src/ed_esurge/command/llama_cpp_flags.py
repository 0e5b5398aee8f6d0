"""Flags of llama.cpp's server that this program does not have under the same name and meaning."""

from __future__ import annotations

import json

from ed_esurge.command.foreign_flag import (
    ALWAYS_ON,
    LLAMA_CPP,
    OVERRIDE,
    SET_IN_CONFIG,
    ForeignFlag,
    ignore_switch,
    ignore_value,
    refuse_switch,
    refuse_value,
)

_DEVICES = "the mesh decides: --tensor-parallel-size or --sharding-axis-dims"
_SEND = "send the option with each request"
_DRAFTS = '--speculative-config {"method": "ngram", "num_speculative_tokens": N}'


def _convert_mib(text: str) -> str:
    return str(float(text) / 1024)


def _sample(names: str, option: str) -> ForeignFlag:
    """Return a flag of llama.cpp with a default of a sampling option."""
    return ForeignFlag(
        LLAMA_CPP,
        tuple(names.split()),
        OVERRIDE,
        convert=lambda text: json.dumps({option: json.loads(text)}),
    )


_CACHE_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8"}
LLAMA_CPP_FLAGS = (
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
    ignore_switch(LLAMA_CPP, "--jinja", "chats always use the template of the model"),
    ignore_switch(LLAMA_CPP, "-cb --cont-batching -nocb --no-cont-batching", ALWAYS_ON),
    ignore_switch(
        LLAMA_CPP, "--metrics --slots --no-slots", "`GET /metrics` and `/slots` are always there"
    ),
    ignore_switch(LLAMA_CPP, "--cache-prompt", "is on: --no-enable-prefix-caching turns it off"),
    ForeignFlag(
        LLAMA_CPP,
        ("--no-cache-prompt",),
        "--no-enable-prefix-caching",
        is_switch=True,
    ),
    ignore_switch(
        LLAMA_CPP, "--embedding --embeddings", "the checkpoint states the task of the model"
    ),
    ignore_switch(LLAMA_CPP, "--rerank --reranking", "the checkpoint states the task of the model"),
    ignore_switch(
        LLAMA_CPP,
        "--mlock --no-mmap --mmap --no-warmup --warmup --repack -nr --no-repack --no-host --perf "
        "--no-perf -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload "
        "-dio --direct-io",
        "weights and pages are in the memory of the device",
    ),
    ignore_switch(
        LLAMA_CPP, "--swa-full -kvu --kv-unified -no-kvu", "all sequences share one pool of pages"
    ),
    ignore_switch(LLAMA_CPP, "--no-context-shift", "a full context ends the answer"),
    refuse_switch(
        LLAMA_CPP,
        "--context-shift",
        "a full context ends the answer: --auto-truncate-prompt shortens prompts",
    ),
    ignore_switch(LLAMA_CPP, "--offline", "directories are never looked up on a hub"),
    ignore_switch(
        LLAMA_CPP,
        "--log-timestamps --no-log-timestamps --log-prefix --no-log-prefix -e --escape --no-escape "
        "--no-ui --no-webui --log-disable",
        "has no counterpart here",
    ),
    ignore_switch(LLAMA_CPP, "-cmoe --cpu-moe --check-tensors", "is not needed here"),
    ignore_value(
        LLAMA_CPP,
        "-ngl --gpu-layers --n-gpu-layers -ncmoe --n-cpu-moe -dev -sm --split-mode "
        "-ts --tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx",
        f"all layers are on the devices of JAX, and {_DEVICES}",
    ),
    ignore_value(LLAMA_CPP, "-fa --flash-attn", "attention never stores all scores"),
    ignore_value(
        LLAMA_CPP,
        "-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --prio --poll --numa "
        "--cpu-strict",
        "all processors of the process are used: taskset or numactl limit them",
    ),
    ignore_value(LLAMA_CPP, "--threads-http --log-colors", "has no counterpart here"),
    ignore_value(
        LLAMA_CPP, "-b --batch-size --keep -dt --defrag-thold", "-ub is the size of a step"
    ),
    ignore_value(
        LLAMA_CPP,
        "--cache-reuse -sps --slot-prompt-similarity -ctxcp --ctx-checkpoints",
        "prefixes are found by their pages",
    ),
    refuse_value(LLAMA_CPP, "-n --predict --n-predict", "send max_tokens with a request", "-1"),
    refuse_value(LLAMA_CPP, "-mu --model-url -dr --docker-repo", "download the file, and name it"),
    refuse_value(LLAMA_CPP, "-hff --hf-file", "download the file, and name it as MODEL"),
    refuse_value(LLAMA_CPP, "-hft", "set the environment variable HF_TOKEN"),
    refuse_value(
        LLAMA_CPP,
        "-mm --mmproj -mmu --mmproj-url",
        "serve the checkpoint in safetensors, which has the tower of images",
    ),
    refuse_value(
        LLAMA_CPP, "--lora --lora-scaled", "use --lora-modules NAME=PATH with a folder of PEFT"
    ),
    refuse_value(LLAMA_CPP, "--pooling", "the checkpoint states how vectors are pooled"),
    refuse_value(
        LLAMA_CPP,
        "--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
        "--yarn-ext-factor --yarn-attn-factor --override-kv",
        SET_IN_CONFIG,
    ),
    refuse_value(
        LLAMA_CPP,
        "--samplers --sampler-seq --dry-multiplier --mirostat --xtc-probability --typical "
        "--typical-p --repeat-last-n -l --logit-bias --grammar --grammar-file -j --json-schema",
        _SEND,
    ),
    refuse_value(LLAMA_CPP, "--reasoning-budget", "send thinking_token_budget", "-1"),
    refuse_value(LLAMA_CPP, "-to --timeout", 'use --limits {"body_timeout": SECONDS}'),
    refuse_value(LLAMA_CPP, "--slot-save-path", "use --prefix-cache-directory"),
    refuse_value(LLAMA_CPP, "--path --api-prefix --log-file", "put a proxy before the server"),
    refuse_value(
        LLAMA_CPP,
        "--draft --draft-max --draft-n --draft-min --spec-type --spec-draft-n-max",
        '--speculative-config {"method": "ngram", "num_speculative_tokens": N}',
    ),
    ForeignFlag(LLAMA_CPP, ("--verbose",), "--log-level", is_switch=True, value="debug"),
    ForeignFlag(LLAMA_CPP, ("--mcp-servers-config",), "--mcp-config"),
    ForeignFlag(LLAMA_CPP, ("--log-jsonl",), "--json", is_switch=True),
    ForeignFlag(
        LLAMA_CPP,
        ("--reasoning", "-rea"),
        values={"auto": ""},
        note="reasoning is found in the chat template",
        refusal='send chat_template_kwargs {"enable_thinking": true or false} with a request',
    ),
    ForeignFlag(
        LLAMA_CPP,
        ("--skip-chat-parsing",),
        "--reasoning-parser",
        is_switch=True,
        value="none",
    ),
    ignore_switch(
        LLAMA_CPP,
        "--no-log-jsonl --no-skip-chat-parsing --no-agent -no-ag --no-ui-mcp-proxy "
        "--no-webui-mcp-proxy --no-cors-credentials --no-models-autoload --models-autoload "
        "--no-prefill-assistant --mmproj-auto --props",
        "is the behavior of this server",
    ),
    ignore_switch(LLAMA_CPP, "--ui --webui", "the page is always there: /"),
    ignore_switch(
        LLAMA_CPP,
        "--no-kv-unified --cache-idle-slots --no-cache-idle-slots",
        "all sequences share one pool of pages",
    ),
    ignore_value(
        LLAMA_CPP,
        "-cms --checkpoint-min-step --swa-checkpoints",
        "prefixes are found by their pages",
    ),
    refuse_value(LLAMA_CPP, "--kv-unified-per-slot", "use --max-model-len"),
    ignore_switch(
        LLAMA_CPP,
        "--mmproj-offload --no-mmproj-offload -bs --backend-sampling --reuse-port "
        "--spec-draft-backend-sampling --no-spec-draft-backend-sampling",
        "is not needed here",
    ),
    ignore_value(
        LLAMA_CPP,
        "-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch "
        "--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd "
        "--threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range "
        "-Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio "
        "--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd "
        "--cpu-mask-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft "
        "--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft",
        "all processors of the process are used: taskset or numactl limit them",
    ),
    ignore_value(
        LLAMA_CPP,
        "-lm --load-mode -lzm --lazy-mode -ot --override-tensor -ncffn --n-cpu-ffn "
        "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-n-cpu-moe "
        "--spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-device -devd --device-draft "
        "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft",
        f"all layers are on the devices of JAX, and {_DEVICES}",
    ),
    ignore_switch(
        LLAMA_CPP, "--spec-draft-cpu-moe -cmoed --cpu-moe-draft", "all layers are on the devices"
    ),
    refuse_value(
        LLAMA_CPP, "--rpc", "start replicas with `esurge join`, or one mesh with --nnodes"
    ),
    refuse_switch(LLAMA_CPP, "--version", "write `esurge --version`"),
    refuse_switch(LLAMA_CPP, "--completion-bash", "write `esurge --install-completion`"),
    refuse_switch(LLAMA_CPP, "--list-devices", "write `elarge doctor`"),
    refuse_switch(LLAMA_CPP, "-cl --cache-list", "write `hf cache ls`"),
    refuse_value(
        LLAMA_CPP,
        "-f --file -bf --binary-file -r --reverse-prompt",
        "send the prompt, and `stop`, with a request",
    ),
    refuse_switch(LLAMA_CPP, "-sp --special", "send skip_special_tokens: false with a request"),
    refuse_switch(LLAMA_CPP, "--spm-infill", "the tokenizer states the order of an infill"),
    refuse_switch(LLAMA_CPP, "--ignore-eos", "send ignore_eos with a request"),
    refuse_value(
        LLAMA_CPP,
        "--sampling-seq --top-nsigma --top-n-sigma --xtc-threshold --dry-base "
        "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target "
        "--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat-lr --mirostat-ent "
        "-jf --json-schema-file --embd-normalize",
        _SEND,
    ),
    refuse_value(LLAMA_CPP, "--yarn-beta-slow --yarn-beta-fast", SET_IN_CONFIG),
    refuse_switch(
        LLAMA_CPP,
        "--no-mmproj --no-mmproj-auto",
        "name the checkpoint of the text model",
    ),
    refuse_value(
        LLAMA_CPP,
        "--image-min-tokens --image-max-tokens --video-fps --video-timestamp-interval",
        "edit preprocessor_config.json",
    ),
    ignore_value(LLAMA_CPP, "--mtmd-batch-max-tokens --video-ffmpeg-dir", "is not needed here"),
    refuse_value(
        LLAMA_CPP,
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        "train an adapter instead: --lora-modules NAME=PATH",
    ),
    refuse_switch(
        LLAMA_CPP, "--lora-init-without-apply", "a request selects an adapter by its name"
    ),
    ignore_value(LLAMA_CPP, "--tags", "is only a label"),
    refuse_value(LLAMA_CPP, "--cors-methods --cors-headers", "--cors-origins allows them", "*"),
    refuse_switch(LLAMA_CPP, "--cors-credentials", "clients of this server send keys, not cookies"),
    ignore_value(
        LLAMA_CPP,
        "--ui-config --webui-config --ui-config-file --webui-config-file",
        "the page stores its settings in the browser",
    ),
    refuse_switch(
        LLAMA_CPP,
        "--ui-mcp-proxy --webui-mcp-proxy --agent -ag",
        "use --mcp-config, whose servers run the tools",
    ),
    refuse_value(
        LLAMA_CPP,
        "--tools --tools-runtime --mcp-servers-json",
        "use --mcp-config FILE, whose servers run the tools",
    ),
    refuse_value(
        LLAMA_CPP, "--chat-template-kwargs", "send chat_template_kwargs with a request", "{}"
    ),
    refuse_value(LLAMA_CPP, "--sse-ping-interval", "put a proxy before the server", "-1"),
    refuse_value(LLAMA_CPP, "--media-path", "send images as data: addresses; files are never read"),
    refuse_value(LLAMA_CPP, "--models-preset", "use --model-directory, or --also"),
    refuse_value(LLAMA_CPP, "--models-max", "use --model-memory"),
    refuse_switch(
        LLAMA_CPP, "--no-jinja", "chats always use a template: --chat-template names another"
    ),
    refuse_value(
        LLAMA_CPP, "--reasoning-effort", "send reasoning_effort with a request", "default"
    ),
    refuse_value(
        LLAMA_CPP, "--reasoning-budget-message", "the reasoning ends with the tag of the template"
    ),
    ignore_switch(
        LLAMA_CPP,
        "--reasoning-preserve --no-reasoning-preserve",
        "the chat template decides which reasoning stays",
    ),
    refuse_switch(LLAMA_CPP, "--prefill-assistant", "send continue_final_message with a request"),
    refuse_value(LLAMA_CPP, "--sleep-idle-seconds", "use --keep-alive", "-1"),
    refuse_value(LLAMA_CPP, "--log-prompts-dir", "the log never has the text of a request"),
    refuse_value(
        LLAMA_CPP,
        "--spec-draft-hf -hfd -hfrd --hf-repo-draft",
        '--speculative-config {"method": "draft_model", "model": ID}',
    ),
    refuse_value(
        LLAMA_CPP,
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic --spec-draft-n-min --draft-n-min "
        "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
        "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
        "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
        "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
        "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        _DRAFTS,
    ),
    ignore_value(
        LLAMA_CPP,
        "--spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min "
        "--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd "
        "--cache-type-v-draft",
        "the engine chooses the number of drafted tokens and the dtype of their pages",
    ),
    refuse_value(LLAMA_CPP, "--spec-synth-len --spec-synth-rates", "drafts are never simulated"),
    refuse_switch(LLAMA_CPP, "--spec-default", _DRAFTS),
    refuse_switch(
        LLAMA_CPP,
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default "
        "--fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default "
        "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
        "--vision-gemma-12b-default",
        "name the model: esurge serve ID",
    ),
)
