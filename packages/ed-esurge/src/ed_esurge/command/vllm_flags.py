"""Flags of `vllm serve` (0.32) that this program does not have under the same name and meaning."""

from __future__ import annotations

from ed_esurge.command.foreign_flag import (
    ALWAYS_ON,
    OVERRIDE,
    SET_IN_CONFIG,
    VLLM,
    ForeignFlag,
    ignore_switch,
    ignore_value,
    read_list,
    read_size,
    refuse_switch,
    refuse_value,
)

_XLA = "has no meaning on JAX: XLA compiles all programs"
_DEFAULT = "is the behavior of this server"
_OFFLOAD = "quantize the weights: --quantization"
_JOIN = "start replicas with --data-parallel-size, or `esurge join` on other hosts"
_DRAFTS = "use --speculative-config"


def _pair(names: str) -> str:
    """Return the names of switches, and of their opposites."""
    return " ".join(f"{name} --no-{name.removeprefix('--')}" for name in names.split())


VLLM_FLAGS = (
    ForeignFlag(VLLM, ("--model",), "MODEL"),
    ForeignFlag(VLLM, ("--dtype",), "--dtype", values={"half": "float16", "float": "float32"}),
    ForeignFlag(VLLM, ("--max-model-len",), "--max-model-len", convert=read_size),
    ForeignFlag(VLLM, ("--max-num-batched-tokens",), "--max-num-batched-tokens", convert=read_size),
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
    ForeignFlag(VLLM, (OVERRIDE,), OVERRIDE),
    ForeignFlag(VLLM, ("--allowed-origins",), "--cors-origins", convert=read_list),
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
    ignore_value(
        VLLM, "--swap-space", "vLLM removed it: --kv-offloading-size sets host memory for pages"
    ),
    ignore_switch(VLLM, "--enable-auto-tool-choice", "tools are always accepted"),
    ignore_switch(VLLM, "--enable-reasoning", "reasoning is found in the chat template"),
    ignore_switch(VLLM, "--enable-chunked-prefill --no-enable-chunked-prefill", ALWAYS_ON),
    ignore_switch(VLLM, "--enable-prompt-tokens-details", ALWAYS_ON),
    ignore_switch(VLLM, "--enable-server-load-tracking", "`GET /load` is always there"),
    ignore_switch(
        VLLM, "--enable-tokenizer-info-endpoint", "`GET /tokenizer_info` is always there"
    ),
    ignore_switch(VLLM, "--enable-request-id-headers", "answers always have X-Request-Id"),
    ignore_switch(VLLM, "--enforce-eager --no-enforce-eager", _XLA),
    ignore_switch(
        VLLM,
        "--disable-log-requests --enable-log-requests --no-enable-log-requests",
        "the log has one line for each request and never its text: --log-level warning omits it",
    ),
    ignore_switch(
        VLLM, "--disable-log-stats --disable-uvicorn-access-log", "use --log-level warning instead"
    ),
    ignore_value(
        VLLM, "--disable-access-log-for-endpoints --max-log-len", "the log has no such lines"
    ),
    ignore_switch(VLLM, "--disable-fastapi-docs", "the pages /docs and /redoc do not exist here"),
    ignore_switch(VLLM, "--disable-custom-all-reduce", _XLA),
    ignore_switch(VLLM, "--disable-hybrid-kv-cache-manager", "pools of pages follow the model"),
    refuse_switch(VLLM, "--disable-sliding-window", "use --max-model-len below the window"),
    ignore_switch(VLLM, "--use-v2-block-manager --multi-step-stream-outputs", "vLLM removed it"),
    ignore_switch(VLLM, "--skip-mm-profiling --fully-sharded-loras --enable-lora-bias", ALWAYS_ON),
    ignore_switch(VLLM, "--enable-dbo --enable-eplb --calculate-kv-scales", "is not needed here"),
    ignore_value(
        VLLM,
        "--compilation-config -cc -O --cuda-graph-sizes --cudagraph-capture-sizes "
        "--max-seq-len-to-capture --attention-backend --attention-config --model-impl "
        "--additional-config --kernel-config --worker-cls --worker-extension-cls",
        _XLA,
    ),
    ignore_value(
        VLLM,
        "--distributed-executor-backend --data-parallel-backend --max-parallel-loading-workers "
        "--ray-workers-use-nsight --all2all-backend",
        "replicas and processes of one model are started by this program",
    ),
    ignore_value(
        VLLM,
        "--prefix-caching-hash-algo --max-num-partial-prefills --max-long-partial-prefills "
        "--scheduler-delay-factor --preemption-mode --stream-interval",
        "the scheduler of this engine needs no such option",
    ),
    ignore_value(
        VLLM,
        "--max-cpu-loras --lora-extra-vocab-size --lora-dtype",
        "all loaded adapters stay on the device",
    ),
    ignore_value(
        VLLM,
        "--guided-decoding-backend --structured-outputs-config",
        "llguidance is the only backend of grammars",
    ),
    ignore_value(
        VLLM,
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-encoder-tp-mode "
        "--collect-detailed-traces --config-format --api-server-count --code-revision "
        "--ignore-patterns --model-loader-extra-config",
        "is not needed here",
    ),
    refuse_value(
        VLLM,
        "--load-format",
        "the files of the checkpoint decide how it is read: omit the flag",
        *("auto", "safetensors", "gguf", "hf", "mistral", "fastsafetensors"),
        note="the files of the checkpoint decide how it is read",
    ),
    refuse_value(VLLM, "--tokenizer-mode", "the tokenizer of the checkpoint is used", "auto", "hf"),
    refuse_value(VLLM, "--tokenizer-revision", "name a folder with --tokenizer"),
    refuse_value(
        VLLM,
        "--runner --task",
        "the checkpoint states the task of the model",
        *("auto", "generate", "pooling", "embed", "classify", "score", "reward", "embedding"),
        note="the checkpoint states the task of the model",
    ),
    refuse_value(
        VLLM, "--convert", "save the checkpoint with the class of the task", "auto", "none"
    ),
    refuse_value(VLLM, "--response-role", "answers have the role assistant", "assistant"),
    refuse_value(
        VLLM,
        "--device",
        "set the environment variable JAX_PLATFORMS=cpu, cuda or tpu",
        "auto",
        note="JAX selects the device",
    ),
    refuse_value(
        VLLM,
        "--pipeline-parallel-size -pp",
        "layers are not split over stages: use --tensor-parallel-size, or --sharding-axis-dims",
        "1",
    ),
    refuse_switch(
        VLLM,
        "--enable-expert-parallel -ep",
        "experts are split along the axis ep: --sharding-axis-dims 1,1,N,1,1",
    ),
    refuse_value(VLLM, "--logprobs-mode", "send `logprobs_mode` with a request", "raw_logprobs"),
    refuse_value(VLLM, "--cpu-offload-gb", "quantize the weights: --quantization", "0"),
    refuse_value(VLLM, "--rope-scaling --rope-theta", SET_IN_CONFIG),
    refuse_value(
        VLLM, "--limit-mm-per-prompt", "the limits of bytes and --max-model-len apply to images"
    ),
    refuse_value(VLLM, "--mm-processor-kwargs --media-io-kwargs", "edit preprocessor_config.json"),
    refuse_value(
        VLLM, "--allowed-local-media-path", "send images as data: addresses; files are never read"
    ),
    refuse_value(
        VLLM, "--default-chat-template-kwargs", "send chat_template_kwargs with a request"
    ),
    refuse_switch(
        VLLM, "--return-tokens-as-token-ids", "send return_tokens_as_token_ids with a request"
    ),
    refuse_switch(
        VLLM, "--enable-force-include-usage", "send stream_options.include_usage with a request"
    ),
    refuse_switch(
        VLLM, "--exclude-tools-when-tool-choice-none", "omit the tools from such a request"
    ),
    refuse_value(
        VLLM, "--tool-parser-plugin --tool-server", "see docs/serving/tools.md: --mcp-config"
    ),
    refuse_value(VLLM, "--download-dir", "set the environment variable HF_HUB_CACHE"),
    refuse_value(VLLM, "--hf-token", "set the environment variable HF_TOKEN"),
    refuse_value(VLLM, "--uds --root-path --middleware", "put a proxy before the server"),
    refuse_value(VLLM, "--ssl-ca-certs --ssl-ciphers", "put a proxy before the server"),
    refuse_value(VLLM, "--ssl-cert-reqs", "put a proxy before the server", "0"),
    refuse_value(
        VLLM, "--allowed-methods --allowed-headers", "--cors-origins allows them", '["*"]'
    ),
    refuse_switch(VLLM, "--allow-credentials", "clients of this server send keys, not cookies"),
    refuse_value(
        VLLM, "--kv-transfer-config --kv-events-config", "one server computes both phases"
    ),
    refuse_value(VLLM, "--speculative-model --num-speculative-tokens", "use --speculative-config"),
    refuse_switch(VLLM, "--headless", "use `esurge join`, or --node-rank"),
    ForeignFlag(VLLM, ("--device-memory-utilization",), "--hbm-utilization"),
    ForeignFlag(VLLM, ("--max-num-active-seqs",), "--max-num-seqs", unless=("--max-num-seqs",)),
    ForeignFlag(
        VLLM,
        ("--max-num-scheduled-tokens",),
        "--max-num-batched-tokens",
        convert=read_size,
        unless=("--max-num-batched-tokens",),
        note="the other flag says so",
    ),
    ForeignFlag(VLLM, ("--shutdown-timeout",), "--drain-seconds"),
    # How programs run on a GPU.
    ignore_value(
        VLLM,
        "--optimization-level --max-cudagraph-capture-size --moe-backend --linear-backend "
        "--gdn-prefill-backend --kda-decode-backend --kda-prefill-backend --mamba-backend "
        "--mamba-ssu-algorithm --sparse-indexer-topk-backend --mm-encoder-attn-backend "
        "--ir-op-priority --performance-mode --dbo-decode-token-threshold "
        "--dbo-prefill-token-threshold --jit-monitor-mode --replayssm-buffer-len",
        _XLA,
    ),
    ignore_switch(
        VLLM,
        _pair(
            "--disable-cascade-attn --enable-flashinfer-autotune --enable-layerwise-nvtx-tracing "
            "--jit-monitor-verbose --enable-cumem-allocator --enable-nccl-comm-suspend "
            "--enable-hc-sp --use-replayssm --enable-batch-sharded-sampling "
            "--enable-flash-late-interaction --sleep-mode-offload-cudagraph "
            "--disable-nccl-for-dp-synchronization --enable-shm-tensor-arena"
        ),
        _XLA,
    ),
    # How weights are read.
    ignore_value(
        VLLM,
        "--safetensors-load-strategy --safetensors-prefetch-block-size "
        "--safetensors-prefetch-num-threads --pt-load-map-location",
        "the files are read straight onto the devices",
    ),
    ignore_switch(
        VLLM,
        _pair("--use-tqdm-on-load --allow-deprecated-quantization --enable-ep-weight-filter"),
        "is not needed here",
    ),
    refuse_value(VLLM, "--quantization-config", "use --quantization"),
    refuse_value(VLLM, "--hf-config-path", SET_IN_CONFIG),
    refuse_value(
        VLLM, "--offload-backend --offload-group-size --offload-num-in-group", _OFFLOAD, "0", "auto"
    ),
    refuse_value(VLLM, "--offload-params --offload-prefetch-step --cpu-offload-params", _OFFLOAD),
    refuse_switch(
        VLLM,
        "--skip-tokenizer-init",
        "requests may consist of token ids, and stop strings need the tokenizer: omit the flag",
    ),
    ignore_switch(VLLM, "--no-skip-tokenizer-init", _DEFAULT),
    # Code of vLLM.
    refuse_value(
        VLLM,
        "--logits-processors --io-processor-plugin --scheduler-cls --model-class-overrides "
        "--reasoning-parser-plugin",
        "classes of vLLM do not run here: docs/adding_parts.md shows how parts are added",
    ),
    refuse_value(VLLM, "--pooler-config", "the checkpoint states how vectors are pooled"),
    refuse_value(VLLM, "--diffusion-config --engram-config", "such models are not served"),
    refuse_value(VLLM, "--reasoning-config", "send thinking_token_budget with a request"),
    refuse_value(VLLM, "--watermark-config", "answers have no watermark"),
    # Pages and states.
    ignore_value(
        VLLM,
        "--watermark --prefix-match-unit --prefix-cache-retention-interval --mamba-cache-mode "
        "--mamba-block-size --prefill-schedule-interval",
        "pages and states are shared, kept and evicted by the engine: --num-pages, --num-states",
    ),
    ignore_switch(
        VLLM,
        _pair(
            "--enable-mamba-shared-prefix-checkpoint --swa-bounded-replay "
            "--kv-sharing-fast-prefill --scheduler-reserve-full-isl --disable-chunked-mm-input "
            "--long-prefill-token-threshold-adaptive"
        ),
        "pages and states are shared, kept and evicted by the engine: --num-pages, --num-states",
    ),
    refuse_value(
        VLLM, "--mamba-cache-dtype --mamba-ssm-cache-dtype", "states keep their dtype", "auto"
    ),
    refuse_switch(VLLM, "--enable-mamba-cache-stochastic-rounding", "states are not rounded"),
    ignore_switch(VLLM, "--no-enable-mamba-cache-stochastic-rounding", _DEFAULT),
    ignore_value(VLLM, "--mamba-cache-philox-rounds", "states are not rounded"),
    refuse_value(VLLM, "--kv-cache-dtype-skip-layers", "all layers have --kv-cache-dtype"),
    refuse_value(VLLM, "--kv-offloading-backend", "use --kv-offloading-size alone", "native"),
    ignore_value(VLLM, "--sleep-preserve-parameter-names", "sleeping keeps all weights"),
    # Replicas and processes.
    refuse_value(
        VLLM,
        "--data-parallel-rank --data-parallel-start-rank --elastic-ep-max-dp-size --device-ids",
        _JOIN,
    ),
    refuse_switch(
        VLLM,
        "--data-parallel-hybrid-lb --data-parallel-external-lb "
        "--data-parallel-multi-port-external-lb --enable-elastic-ep",
        _JOIN,
    ),
    ignore_switch(
        VLLM,
        "--no-data-parallel-hybrid-lb --no-data-parallel-external-lb "
        "--no-data-parallel-multi-port-external-lb --no-enable-elastic-ep",
        _DEFAULT,
    ),
    ignore_value(
        VLLM,
        "--data-parallel-supervisor-port --dp-supervisor-probe-failure-threshold "
        "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-sync-interval "
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds --fault-tolerance-config",
        "replicas that end or fall silent leave the group, and others answer",
    ),
    ignore_switch(
        VLLM,
        _pair("--enable-fault-tolerance"),
        "replicas that end or fall silent leave the group, and others answer",
    ),
    refuse_value(
        VLLM,
        "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp",
        "use the axis sp: --sharding-axis-dims 1,1,1,1,N",
        "1",
    ),
    ignore_value(
        VLLM,
        "--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
        "the mesh decides: --sharding-axis-dims",
    ),
    ignore_switch(VLLM, _pair("--dcp-q-replicate"), "the mesh decides: --sharding-axis-dims"),
    ignore_value(VLLM, "--eplb-config --expert-placement-strategy", "is not needed here"),
    ignore_switch(VLLM, _pair("--numa-bind"), "numactl limits the process"),
    ignore_value(VLLM, "--numa-bind-cpus --numa-bind-nodes", "numactl limits the process"),
    refuse_value(
        VLLM, "--ec-transfer-config --ec-manager-config", "one server computes both phases"
    ),
    refuse_value(
        VLLM,
        "--weight-transfer-config",
        "use --weights-directory, from which `POST /update_weights_from_disk` reads",
    ),
    # Images, videos and sound.
    ignore_value(
        VLLM,
        "--mm-shm-cache-max-object-size-mb --mm-tensor-ipc --mm-ipc-gpu-memory-gb "
        "--mm-processor-device --mm-hasher-algorithm --renderer-num-workers",
        "images are read in limited processes, and known by the hash of their contents",
    ),
    ignore_switch(VLLM, _pair("--mm-device-do-normalize"), "is not needed here"),
    ignore_switch(VLLM, _pair("--interleave-mm-strings"), ALWAYS_ON),
    refuse_value(
        VLLM,
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
        "--mm-encoder-fp8-scale-save-margin",
        "towers compute in --dtype",
    ),
    refuse_switch(VLLM, "--mm-encoder-only", "one server computes towers and text"),
    refuse_switch(VLLM, "--language-model-only", "name the checkpoint of the text model"),
    refuse_switch(VLLM, "--enable-mm-embeds", "send images, or --enable-prompt-embeds for vectors"),
    refuse_switch(VLLM, "--trust-request-mm-kwargs", "edit preprocessor_config.json"),
    ignore_switch(
        VLLM,
        "--no-mm-encoder-only --no-language-model-only --no-enable-mm-embeds "
        "--no-trust-request-mm-kwargs",
        _DEFAULT,
    ),
    refuse_value(VLLM, "--video-pruning-rate", "all frames of a video are read", "0", "0.0"),
    ignore_value(VLLM, "--video-pruning-method", "all frames of a video are read"),
    # Adapters.
    refuse_value(VLLM, "--lora-target-modules", "use --lora-targets PATTERN,PATTERN"),
    refuse_value(VLLM, "--default-mm-loras", "name the adapter in the request"),
    refuse_switch(
        VLLM,
        "--enable-tower-connector-lora",
        "merge such an adapter: elarge merge BASE ADAPTER DIR",
    ),
    ignore_switch(VLLM, "--no-enable-tower-connector-lora", _DEFAULT),
    ignore_value(VLLM, "--max-lora-cls-labels", "the adapter states its number of classes"),
    ignore_switch(
        VLLM,
        _pair("--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras"),
        "the shapes of an adapter state its layout",
    ),
    # Drafts and sampling.
    refuse_value(VLLM, "--spec-method --spec-model --spec-tokens", _DRAFTS),
    refuse_switch(VLLM, "--use-fp64-gumbel", "the noise of sampling is float32"),
    refuse_switch(
        VLLM,
        "--return-sampling-mask --enable-return-routed-experts --enable-trace-replay",
        "answers have no such field",
    ),
    ignore_switch(
        VLLM,
        "--no-use-fp64-gumbel --no-return-sampling-mask --no-enable-return-routed-experts "
        "--no-enable-trace-replay",
        _DEFAULT,
    ),
    ignore_value(VLLM, "--aux-output-config", "answers have no such field"),
    # The server.
    refuse_switch(VLLM, "--grpc", "requests are HTTP"),
    refuse_value(VLLM, "--grpc-port", "requests are HTTP"),
    refuse_switch(VLLM, "--enable-log-outputs", "the log never has the text of an answer"),
    ignore_switch(VLLM, "--no-enable-log-outputs", _DEFAULT),
    ignore_switch(
        VLLM, _pair("--enable-log-deltas --log-error-stack"), "the log has no such lines"
    ),
    refuse_value(VLLM, "--log-config-file --logging-config", "use --log-level"),
    ignore_switch(
        VLLM, _pair("--aggregate-engine-logging"), "one log has the lines of all replicas"
    ),
    ignore_switch(
        VLLM,
        _pair(
            "--cudagraph-metrics --kv-cache-metrics --enable-mfu-metrics "
            "--enable-logging-iteration-details"
        ),
        "`GET /metrics` has the metrics of this server",
    ),
    ignore_value(
        VLLM,
        "--kv-cache-metrics-sample --show-hidden-metrics-for-version --custom-histogram-buckets "
        "--profiler-config",
        "`GET /metrics` has the metrics of this server",
    ),
    refuse_switch(
        VLLM,
        "--enable-per-request-metrics",
        "`GET /metrics`, and X-Cached-Prompt-Tokens of an answer, have such values",
    ),
    ignore_switch(VLLM, "--no-enable-per-request-metrics", _DEFAULT),
    refuse_value(
        VLLM, "--per-request-spec-decode-metrics", "`GET /metrics` has the accepted tokens", "none"
    ),
    refuse_switch(VLLM, "--enable-ssl-refresh", "put a proxy before the server"),
    refuse_switch(VLLM, "--enable-scale-out --tokens-only", "send token ids to /v1/completions"),
    ignore_switch(
        VLLM,
        "--no-grpc --no-enable-ssl-refresh --no-enable-scale-out --no-tokens-only "
        "--no-disable-frontend-multiprocessing",
        _DEFAULT,
    ),
    ignore_switch(
        VLLM, "--disable-frontend-multiprocessing", "the engine is a thread of the server"
    ),
    ignore_switch(
        VLLM, _pair("--enable-offline-docs"), "the pages /docs and /redoc do not exist here"
    ),
    ignore_switch(VLLM, _pair("--fail-on-environ-validation"), "is not needed here"),
    ignore_value(
        VLLM,
        "--h11-max-incomplete-event-size --h11-max-header-count",
        "headers and bodies are limited: --limits",
    ),
    refuse_value(
        VLLM,
        "--max-num-queued-reqs --max-num-queued-tokens",
        'use --limits {"max_concurrent_requests": N}',
    ),
    ignore_value(VLLM, "--fingerprint-mode --fingerprint-value", "answers have no such field"),
    refuse_value(VLLM, "--sse-keep-alive-interval", "put a proxy before the server", "0"),
    refuse_value(VLLM, "--tool-strict-level", "send `strict` with a tool", "auto"),
    refuse_value(
        VLLM, "--anthropic-disabled-thinking-effort", "send reasoning_effort with a request", "auto"
    ),
    refuse_value(VLLM, "--cohere-format", "the chat template of the checkpoint is used", "cmd4"),
    ignore_switch(
        VLLM, _pair("--cohere-is-reasoning-model"), "reasoning is found in the chat template"
    ),
)
