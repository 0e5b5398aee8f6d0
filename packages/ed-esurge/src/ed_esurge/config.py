"""Options of the engine (the YAML section `esurge`). Imports neither jax nor transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from ed_infra.options import Count, Options, Whole
from pydantic import AfterValidator, AwareDatetime, Field, model_validator

#: Maximum number of saved recurrent states for each running sequence.
STATES_PER_SEQUENCE = 16

# Tokens and pages are counted in 32 bits on the device.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]


def _check_address(address: str) -> str:
    """Return the address of an endpoint without a final slash.

    Raises:
        ValueError: the address is not `http://host:port`.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(
            f"{address!r} is no address of a tokenizer: write http://HOST:PORT of a server with "
            "the routes /tokenize and /detokenize, such as `esurge serve`"
        )
    return address.rstrip("/")


#: Address of a server with the routes of a tokenizer.
Address = Annotated[str, AfterValidator(_check_address)]
#: Policy of the HTTP server for unknown request fields.
UnknownFields = Literal["ignore", "warn", "refuse"]


class ApiKey(Options):
    """The digest of a key, and its limits."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hexadecimal digest of the key: `printf %s KEY | sha256sum`."""
    name: Annotated[str, Field(max_length=256)] = ""
    """Name of the owner, for readers of the file."""
    expires: AwareDatetime | None = None
    """Time after which the key is rejected, with a time zone (`2030-01-01T00:00:00Z`)."""
    max_concurrent_requests: Count | None = None
    """Maximum number of concurrent requests (429)."""
    requests_per_minute: Count | None = None
    """Maximum number of requests in 60 seconds (429)."""
    admin: bool = False
    """Whether the key may call the administrative routes: sleep, adapters, resetting the prefix
    cache."""

    @classmethod
    def of(cls, key: str, *, admin: bool = False) -> ApiKey:
        """Return a key without limits."""
        return cls(sha256=hashlib.sha256(key.encode()).hexdigest(), admin=admin)


class ServerLimits(Options):
    """Limits of the HTTP server. A request beyond a limit fails with an error that names the
    limit."""

    max_body_bytes: Annotated[int, Field(ge=1024, lt=2**31)] = 2**23
    """Maximum size of a request body, in bytes (status 413)."""
    max_bytes_in_flight: Annotated[int, Field(ge=1024, lt=2**53)] = 2**29
    """Maximum total size of the bodies, uploads and answers of all requests in flight, in bytes
    (status 503, with `Retry-After`). A client with another request in flight may use half. At least
    `max_body_bytes`, `max_file_bytes` and `max_audio_bytes`."""
    max_answer_bytes: Annotated[int | None, Field(ge=1024, lt=2**53)] = None
    """Maximum memory of an answer, in bytes (status 400). The server computes a bound from prompts,
    choices, tokens and log-probabilities before it admits a request. None: half of
    `max_bytes_in_flight`."""
    max_concurrent_requests: PositiveInt = 1024
    """Maximum number of running and queued requests (status 429, with `Retry-After`)."""
    max_connections: PositiveInt = 4096
    """Maximum number of open connections, capped by the file descriptor limit of the process.
    Further connections are closed."""
    max_generations: PositiveInt = 1024
    """Maximum number of completions of one request: its prompts times `n` or `best_of` (status
    400)."""
    max_stored_responses: Annotated[int, Field(ge=0, lt=2**31)] = 1024
    """Maximum number of `/v1/responses` results kept in memory for each API key. The oldest are
    dropped first."""
    max_conversation_bytes: Annotated[int, Field(ge=1024, lt=2**53)] = 2**25
    """Maximum size of a `/v1/responses` request with the stored messages of the conversation that
    it continues, in bytes (status 400)."""
    max_background_responses: PositiveInt = 64
    """Maximum number of unfinished background responses for each API key (status 429)."""
    max_file_bytes: Annotated[int, Field(ge=1024, lt=2**31)] = 2**27
    """Maximum size of a `/v1/files` file, in bytes (status 413)."""
    max_audio_bytes: Annotated[int, Field(ge=1024, lt=2**31)] = 25 * 2**20
    """Maximum size of an audio file of a request, in bytes (status 413)."""
    max_audio_seconds: Annotated[float, Field(gt=0, le=86400)] = 3600.0
    """Maximum length of a recording, in seconds (status 413)."""
    max_concurrent_transcriptions: PositiveInt = 32
    """Maximum number of running and waiting transcriptions of a model (status 429, with
    `Retry-After`). A client with another transcription may use half."""
    max_files: PositiveInt = 1024
    """Maximum number of stored files for each API key (status 429)."""
    max_stored_bytes: Annotated[int, Field(ge=1024, lt=2**53)] = 2**33
    """Maximum total size of the files of one API key, in bytes (status 413)."""
    max_batches: PositiveInt = 64
    """Maximum number of queued and running batches for each API key (status 429)."""
    max_batch_requests: PositiveInt = 50_000
    """Maximum number of lines of a batch. A longer batch fails."""
    batch_concurrency: PositiveInt = 16
    """Number of batch lines that run concurrently."""
    body_timeout: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """Timeout for receiving the headers and the body of a request, in seconds (status 408)."""
    write_timeout: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Time in which a client must read the waiting part of an answer, or 1024 bytes per second, in
    seconds. The connection of a slower client is closed."""
    request_timeout: Annotated[float, Field(gt=0, le=1e6)] = 3600.0
    """Timeout for answering a request, in seconds (status 408; a stream ends with an error)."""

    @property
    def answer_bytes(self) -> int:
        """The maximum memory of an answer, in bytes."""
        half = self.max_bytes_in_flight // 2
        return half if self.max_answer_bytes is None else self.max_answer_bytes

    @model_validator(mode="after")
    def _bodies_fit(self) -> ServerLimits:
        longest = max(self.max_body_bytes, self.max_file_bytes, self.max_audio_bytes)
        if longest > self.max_bytes_in_flight:
            raise ValueError(
                f"max_bytes_in_flight {self.max_bytes_in_flight} is below {longest}, the longest "
                "body or file: raise max_bytes_in_flight, or lower max_body_bytes, "
                "max_file_bytes and max_audio_bytes"
            )
        if self.answer_bytes > self.max_bytes_in_flight:
            raise ValueError(
                f"max_answer_bytes {self.answer_bytes} exceeds max_bytes_in_flight "
                f"{self.max_bytes_in_flight}: lower max_answer_bytes, or raise max_bytes_in_flight"
            )
        return self


class SamplingDefaults(Options):
    """Values of sampling options that a request omits. None: the default of the endpoint."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @property
    def values(self) -> dict[str, float]:
        """The values that are not None, by name."""
        return self.model_dump(exclude_none=True)


class SpeculativeConfig(Options):
    """Options of speculative decoding. The names are vLLM's.

    Tokens are proposed only while the queue is empty and a step has free rows. Beams, requests with
    mirostat, and requests with both a penalty or bias and a filter of the whole distribution
    receive no proposals.
    """

    method: Literal["ngram", "suffix", "draft_model", "mtp"] = "ngram"
    """Source of the proposals. `ngram`: the tokens that followed an earlier occurrence of the last
    tokens in the prompt or output. `suffix`: the most frequent continuations of the longest earlier
    occurrence in the prompt, the output, and the outputs of earlier requests with the same
    `cache_salt`. `draft_model`: the samples of a small model with the same vocabulary. `mtp`: the
    samples of the MTP layer of the model's checkpoint (`mtp.*`), which reads hidden states of the
    model."""
    model: str | None = None
    """Directory or hub id of the draft model. Alternatively, pass `draft_model` to `eSurge`."""
    num_speculative_tokens: Annotated[int, Field(gt=0, le=64)] = 4
    """Maximum number of proposed tokens for a sequence in one step."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """`mtp`: number of tokens that the layer may propose, the most frequent ones by the counts of
    the checkpoint (`mtp.token_counts`, which the trainer `draft` writes), or the first ones without
    counts; None = all. The head is most of the work of a small model's draft."""
    adaptive_length: bool = True
    """Whether the number of proposed tokens follows the acceptance of each request. A request whose
    proposals are rarely accepted has none for 16 to 256 tokens, and then a trial."""
    suffix_decoding_max_tree_depth: Annotated[int, Field(gt=1, le=1024)] = 24
    """`suffix`: maximum length of the context to compare, in tokens."""
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, le=2**20)] = 1000
    """`suffix`: number of finished requests whose outputs are searched, at most 262,144 tokens. 0:
    only the text of the request itself."""
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0, le=64)] = 1.0
    """`suffix`: maximum number of proposed tokens for each token of the context."""
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    """`suffix`: smallest share of the occurrences that must have continued with the proposed
    tokens."""
    prompt_lookup_max: Annotated[int, Field(gt=0, le=64)] = 4
    """Maximum length of the n-gram to match, in tokens."""
    prompt_lookup_min: Annotated[int, Field(gt=0, le=64)] = 2
    """Minimum length of the n-gram to match, in tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        if self.model is not None and self.method != "draft_model":
            raise ValueError(
                f"model {self.model!r} proposes nothing with method {self.method}: set method to "
                "draft_model, or leave model out"
            )
        if self.draft_vocab_size is not None and self.method != "mtp":
            raise ValueError(
                f"draft_vocab_size has no effect with method {self.method}: omit it, or set method "
                "to mtp"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}: lower it"
            )
        return self


class EngineConfig(Options):
    """Options of `eSurge`. Unknown names raise an error.

    Lengths are in tokens. The devices are those of the model's mesh.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"gpu_memory_utilization": "hbm_utilization"}

    # Capacity.
    max_model_len: PositiveInt = 8192
    """Maximum length of prompt plus completion, in tokens. The engine uses the limit of the model
    if that limit is lower, and logs a message if this option was set."""
    max_num_seqs: Annotated[int, Field(gt=0, le=2**16)] = 256
    """Maximum number of sequences in one step. The default on a CPU is 16, because larger batches
    compile more slowly."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens in one step. Longer prompts are prefilled in chunks. None: 8192 on
    TPU, 2048 on GPU, 512 on CPU."""
    long_prefill_token_threshold: PositiveInt | None = None
    """Maximum number of prompt tokens of one sequence in one step. None:
    `max_num_batched_tokens`."""
    page_size: Annotated[int, Field(gt=0, le=2**16)] = 128
    """Number of tokens in one page of the key/value cache."""
    num_pages: PositiveInt | None = None
    """Number of pages in the pool, or in each pool where sliding-window layers have a separate
    pool. None: the number that fits into `hbm_utilization` (accelerator) or `cpu_cache_gib` (CPU),
    capped at the pages that `max_num_seqs` sequences of `max_model_len` can use."""
    num_states: PositiveInt | None = None
    """Number of saved states of recurrent and convolution layers. Requests with an equal prefix
    continue from them. Their memory is allocated when the engine starts. None: the number that fits
    into a third of the memory for pages (all of it if the model has no attention), or into half the
    bytes of `num_pages` pages; at most 16 for each sequence of `max_num_seqs`."""
    hbm_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Maximum fraction of accelerator memory for weights and pages together."""
    cpu_cache_gib: Annotated[float, Field(gt=0, le=2**20)] = 1.0
    """Maximum size of the page pool on the CPU backend, in GiB. A pool that is too small for one
    sequence of `max_model_len` is enlarged to hold that sequence."""
    kv_offloading_size: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Host memory for pages that the prefix cache evicts, in GiB over all devices. A later request
    with the same prefix copies these pages back to the device. None: evicted pages are
    recomputed."""

    prefix_cache_directory: str | None = None
    """Directory in which the pages of the prefix cache survive a restart. The engine writes the
    pages when it is shut down, a server also while it runs, and reads them into host memory when it
    starts, so the option requires `kv_offloading_size`. Files belong to the model with exactly
    these weights and options."""
    prefix_cache_directory_size: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """Maximum size of that directory, in GiB. The least recently used pages are deleted."""
    prefix_cache_interval: Annotated[float, Field(gt=0, le=2**31)] | None = 10.0
    """Seconds after which a running server writes new pages to that directory, at most 64 MiB at a
    time. A server that is killed loses the other pages only. None: at the shutdown only."""

    data_parallelism_axis: str | None = "dp"
    """Mesh axis of data parallelism. Each index along the axis is a replica with separate weights,
    pages and prefix cache. A request is routed to the replica with the earliest expected finish.
    The sizes above apply to each replica, except those in GiB, which apply to all replicas
    together. None: one engine over the whole mesh, with equal computations along `dp`."""

    # Execution and scheduling.
    enable_prefix_caching: bool = True
    """Keep the pages of finished prompts and reuse them for prompts with an equal prefix."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue. `fcfs`: arrival. `priority`: the request's `priority` (smaller
    first), then arrival."""
    compile_runner: bool = True
    """Compile every shape before the engine is ready. False: compile each shape at its first
    use."""
    compile_in_background: bool = False
    """Compile one generic shape before the engine is ready, and the others in a thread while the
    engine serves. Until then, steps compute more padding. The last bits of results depend on the
    shapes of the steps, and with this option also on time. `esurge serve` and `esurge chat` set
    this option by default. Engines with `batch_invariant`, an encoder, a draft model, replicas or
    several processes, and models for speech, compile everything first."""
    use_aot_forward: bool = True
    """Call executables that are compiled ahead of time. False: call through `jax.jit`, which
    compiles an unexpected shape instead of failing."""
    async_scheduling: bool = True
    """Start the next decode step before the host reads the tokens of the current step, so that the
    device does not wait for the host. The outputs do not change. A request that ends at an
    end-of-sequence token, a stop token or a stop string computes one extra token, which is
    discarded."""
    num_scheduler_steps: Annotated[int, Field(ge=1, le=64)] | None = None
    """Maximum number of decode steps that one program computes. The outputs do not change. A new
    request waits for the running program, and a stream receives the tokens of a program together.
    None: up to 8 steps if the steps of the model are short, so that a program needs a few
    milliseconds. 1: each step has a program. A step has its own program if a request waits, if a
    prompt is incomplete, and if a penalty, a bias, `min_tokens`, a grammar, a beam search or a
    filter of the whole distribution is used. All steps of engines with `batch_invariant`,
    `speculative_config`, an encoder or records have their own programs."""
    overlap_execution: bool = False
    """Detokenize and deliver the results of a step while the device runs the next step. The outputs
    do not change. A request that ends at a stop string computes one extra token, which is
    discarded."""
    min_input_pad: PositiveInt = 16
    """Smallest token bucket of a prefill step. On a CPU, 32 if the native library omits padding and
    the option is not set."""
    max_num_seq_buckets: tuple[PositiveInt, ...] | None = None
    """Numbers of sequences that a step is padded to, ascending. None: powers of two up to
    `max_num_seqs`."""
    max_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = 20
    """Maximum value of `logprobs` and `prompt_logprobs` in a request."""
    enable_prompt_embeds: bool = False
    """Accept prompts of embeddings instead of token ids: the field `prompt_embeds` of
    `/v1/completions`, and `eSurge.embedded_prompt`. Any values reach the model, so enable the
    option only for trusted clients."""
    batch_invariant: bool = False
    """Compute every token in the same program, in a separate row. Tokens and log-probabilities of a
    request are then bitwise equal for every batch, prefix cache state, preemption, chunk size and
    speculation. One shape of `max_num_batched_tokens` tokens (default: `max_num_seqs`) is compiled,
    and every step has the cost of that shape."""
    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding: verify several proposed tokens in one step. The outputs do not
    change."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of requests without `seed`, combined with the arrival number of the request."""
    silent_mode: bool = False
    """Disable progress bars and the start-up summary."""

    # Prompts that exceed the context.
    auto_truncate_prompt: bool = False
    """Truncate a prompt that leaves no room for a completion. The HTTP server reports the
    truncation in the response. False: reject the prompt."""
    truncate_mode: Literal["left", "right", "middle"] = "left"
    """The part of a long prompt that `auto_truncate_prompt` removes."""
    auto_cap_new_tokens: bool = True
    """Reduce `max_tokens` to the free part of the context. Such a completion may finish with the
    reason `length`. False: reject the request."""
    prefer_preserve_prompt: bool = True
    """Reduce `max_tokens` before truncating the prompt. False: truncate the prompt first."""
    reserve_tokens: Annotated[int, Field(ge=0)] | None = None
    """Number of context tokens reserved for the completion when a prompt is truncated. None: 1."""
    strict_context: bool = False
    """Reject requests that exceed the context. Overrides the four options above."""

    # Adapters that requests select by name.
    max_loras: Annotated[int, Field(ge=0, le=2**12)] = 0
    """Maximum number of loaded LoRA adapters (`load_lora_adapter`). The engine allocates memory for
    this number of adapters of rank `max_lora_rank` on every layer of `lora_targets`. 0: no
    adapters, no memory."""
    max_lora_rank: Annotated[int, Field(gt=0, le=2**12)] = 16
    """Maximum rank of a loaded adapter."""
    lora_targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Patterns for the names of the layers that loaded adapters may modify: linear layers, and
    experts (`experts`). None: every linear layer except the head and the experts."""

    # Stop conditions of every request.
    extra_eos_token_ids: tuple[Whole, ...] = ()
    """Additional end-of-sequence token ids (ignored with `ignore_eos`)."""
    extra_stops: tuple[str, ...] = ()
    """Additional stop strings of every request."""

    destroy_pages_on_pause: bool = True
    """Free the page pools on `pause()`. Only the weights then remain in device memory."""

    tokenizer_endpoint: Address | None = None
    """Address `http://HOST:PORT` of a server with vLLM's route `/tokenize`, such as `esurge serve`,
    that encodes the texts of prompts. Chats are encoded in the process of the engine. None: all
    texts are encoded there."""
    detokenizer_endpoint: Address | None = None
    """Address of a server with the route `/detokenize` that decodes the tokens of outputs, with two
    requests per token. None: the process of the engine decodes them."""

    def share_memory(self, place: int, count: int) -> dict[str, float]:
        """Return the options of one of several engines on the same devices.

        On an accelerator, each engine uses the memory that remains below its `hbm_utilization`.

        Args:
            place: number of the engine in the order of loading, from 1.
            count: number of engines.
        """
        shares = {
            "hbm_utilization": self.hbm_utilization * place / count,
            "cpu_cache_gib": self.cpu_cache_gib / count,
        }
        if self.kv_offloading_size is not None:
            shares["kv_offloading_size"] = self.kv_offloading_size / count
        return shares

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        buckets = self.max_num_seq_buckets
        if buckets is not None:
            if list(buckets) != sorted(set(buckets)) or not buckets:
                raise ValueError(f"max_num_seq_buckets {buckets} must be ascending and not empty")
            if buckets[-1] < self.max_num_seqs:
                raise ValueError(
                    f"the largest of max_num_seq_buckets, {buckets[-1]}, is below "
                    f"max_num_seqs {self.max_num_seqs}: append {self.max_num_seqs}"
                )
        budget = self.max_num_batched_tokens
        if (
            budget is not None
            and budget < self.max_num_seqs
            and "max_num_seqs" in self.model_fields_set
        ):
            raise ValueError(
                f"max_num_batched_tokens {budget} is below max_num_seqs {self.max_num_seqs}: "
                "each running sequence needs one token of a step"
            )
        if self.num_pages is not None and self.num_pages * self.page_size >= 2**31:
            raise ValueError(
                f"num_pages {self.num_pages} of page_size {self.page_size} hold "
                f"{self.num_pages * self.page_size} tokens; a pool holds fewer than 2**31: lower "
                "num_pages"
            )
        for name in ("max_lora_rank", "lora_targets"):
            default = type(self).model_fields[name].default
            if not self.max_loras and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is for adapters that are loaded, and max_loras is 0: set it to how "
                    "many there can be"
                )
        if self.num_states is not None and not self.enable_prefix_caching:
            raise ValueError(
                f"num_states {self.num_states} is for states of the prefix cache, and "
                "enable_prefix_caching is off: set it to true, or leave num_states out"
            )
        if self.kv_offloading_size is not None and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size is for pages of the prefix cache, and enable_prefix_caching is "
                "off: set it to true, or leave kv_offloading_size out"
            )
        if self.prefix_cache_directory is not None:
            if self.kv_offloading_size is None:
                raise ValueError(
                    "prefix_cache_directory restores pages into host memory: set "
                    "kv_offloading_size as well"
                )
            if self.max_loras:
                raise ValueError(
                    "prefix_cache_directory cannot identify the adapters of pages: omit max_loras "
                    "or prefix_cache_directory"
                )
        if (self.reserve_tokens or 0) >= self.max_model_len:
            raise ValueError(
                f"reserve_tokens {self.reserve_tokens} leaves no room for a prompt "
                f"in max_model_len {self.max_model_len}"
            )
        return self


class Records(NamedTuple):
    """Records of the outputs.

    Attributes:
        experts: the experts that the routers chose for each token.
        masks: the tokens of the vocabulary from which each token was sampled.
    """

    experts: bool = False
    masks: bool = False


NOTHING = Records()
