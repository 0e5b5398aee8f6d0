"""Options of the engine (the YAML section `esurge`). Imports neither jax nor transformers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import Options
from pydantic import Field, model_validator

# Tokens and pages are counted in 32 bits on the device.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: What becomes of request fields that the HTTP server does not know.
UnknownFields = Literal["ignore", "warn", "refuse"]


class ServerLimits(Options):
    """What the HTTP server takes from its clients; beyond it they get an error that says so."""

    max_body_bytes: Annotated[int, Field(ge=1024, lt=2**31)] = 2**23
    """Longest body of a request (413)."""
    max_bytes_in_flight: Annotated[int, Field(ge=1024, lt=2**53)] = 2**29
    """Bytes of the bodies and uploads of all requests in flight (503, with `Retry-After`); a client
    with another request in flight gets half. At least the longest body and the longest file."""
    max_concurrent_requests: PositiveInt = 1024
    """Requests that are answered or wait at the same time (429, with `Retry-After`)."""
    max_connections: PositiveInt = 4096
    """Open connections; never more than the process may have files. Others are closed."""
    max_generations: PositiveInt = 1024
    """Completions of one request: its prompts times `n` or `best_of` (400)."""
    max_stored_responses: Annotated[int, Field(ge=0, lt=2**31)] = 1024
    """Answers of `/v1/responses` that are kept in memory for each API key; the oldest make room."""
    max_file_bytes: Annotated[int, Field(ge=1024, lt=2**31)] = 2**27
    """Longest file of `/v1/files` (413)."""
    max_files: PositiveInt = 1024
    """Files that each API key may keep (429)."""
    max_stored_bytes: Annotated[int, Field(ge=1024, lt=2**53)] = 2**33
    """Bytes of all files of an API key (413)."""
    max_batches: PositiveInt = 64
    """Batches of each API key that wait or run (429)."""
    max_batch_requests: PositiveInt = 50_000
    """Lines of a batch; one with more fails."""
    batch_concurrency: PositiveInt = 16
    """Lines of a batch that are answered at the same time."""
    body_timeout: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """Seconds in which a request must have arrived, head and body (408)."""
    request_timeout: Annotated[float, Field(gt=0, le=1e6)] = 3600.0
    """Seconds in which a request must be answered (408; a stream ends with an error)."""

    @model_validator(mode="after")
    def _bodies_fit(self) -> ServerLimits:
        longest = max(self.max_body_bytes, self.max_file_bytes)
        if longest > self.max_bytes_in_flight:
            raise ValueError(
                f"max_bytes_in_flight {self.max_bytes_in_flight} is below {longest}, the longest "
                "body or file: raise max_bytes_in_flight, or lower max_body_bytes and "
                "max_file_bytes"
            )
        return self


class SpeculativeConfig(Options):
    """How tokens are proposed. Only while no request waits and rows of a step are free, and not for
    requests with penalties, biases or masks of tokens. The names are vLLM's."""

    method: Literal["ngram", "draft_model"] = "ngram"
    """`ngram`: what followed the last tokens where they stood before, in prompt or output.
    `draft_model`: what a small model of the same vocabulary samples."""
    model: str | None = None
    """The draft model, a directory or a hub id; or give `eSurge` a `draft_model`."""
    num_speculative_tokens: Annotated[int, Field(gt=0, le=64)] = 4
    """Most proposals for a sequence in one step."""
    prompt_lookup_max: Annotated[int, Field(gt=0, le=64)] = 4
    """Most last tokens that must stand there."""
    prompt_lookup_min: Annotated[int, Field(gt=0, le=64)] = 2
    """Fewest last tokens that must stand there."""

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        if self.model is not None and self.method != "draft_model":
            raise ValueError(
                f"model {self.model!r} proposes nothing with method {self.method}: set method to "
                "draft_model, or leave model out"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}: lower it"
            )
        return self


class EngineConfig(Options):
    """Options of `eSurge`. Every one changes what the engine does; unknown names are refused.

    Lengths are in tokens. Nothing here names a device: the model brings its mesh.
    """

    ALIASES: ClassVar[dict[str, str]] = {"gpu_memory_utilization": "hbm_utilization"}

    # How much fits.
    max_model_len: PositiveInt = 8192
    """Longest prompt plus completion. The engine uses the model's own limit where that is lower,
    and logs a message where this option was set."""
    max_num_seqs: Annotated[int, Field(gt=0, le=2**16)] = 256
    """Most sequences in one step. On a CPU the default is 16, because more take longer to
    compile."""
    max_num_batched_tokens: PositiveInt | None = None
    """Token budget of one step; longer prompts are prefilled in chunks. None: 8192 on TPU, 2048 on
    GPU, 512 on CPU."""
    long_prefill_token_threshold: PositiveInt | None = None
    """Most prompt tokens that one sequence may take of a step. None: the whole budget."""
    page_size: Annotated[int, Field(gt=0, le=2**16)] = 128
    """Tokens of one page of the key/value cache."""
    num_pages: PositiveInt | None = None
    """Pages in the pool (in each, where layers of a sliding window have their own). None: as many
    as `hbm_utilization` (accelerator) or `cpu_cache_gib` hold, and never more than `max_num_seqs`
    sequences of `max_model_len` can use."""
    hbm_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Part of an accelerator's memory that weights and pages together may take."""
    cpu_cache_gib: Annotated[float, Field(gt=0, le=2**20)] = 1.0
    """Upper bound of the page pool on the CPU backend, GiB. Grown, if need be, to hold one sequence
    of `max_model_len`."""
    kv_offloading_size: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """GiB of host memory, over all devices, for pages that the prefix cache gives up. They are
    copied back for a later request with that prefix. None: they are computed anew."""

    data_parallelism_axis: str | None = "dp"
    """Axis of the model's mesh along which replicas lie: each has its own weights, pages and
    prefix cache, and a request goes to the one that is soonest done with it. The sizes above are
    of each replica (those in GiB of all together). None: one engine over the whole mesh, whose
    devices along `dp` all compute the same."""

    # What runs, and when.
    enable_prefix_caching: bool = True
    """Keep the pages of finished prompts and reuse those with an equal prefix."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue: arrival, or `priority` (smaller first) and then arrival."""
    compile_runner: bool = True
    """Compile every shape before the engine is ready. False: each at its first use."""
    use_aot_forward: bool = True
    """Call executables that were compiled ahead of time. False: call through `jax.jit`, which
    traces an unexpected shape instead of failing."""
    async_scheduling: bool = True
    """Start a step that decodes on before the tokens of the last one are read, so that the device
    does not wait for the host. The tokens are the same; a request that ends with a token or string
    of its own costs one more token, which is thrown away."""
    overlap_execution: bool = False
    """Detokenize and deliver the results of a step while the device runs the next one. The tokens
    are the same; a stop string costs one more token, which is thrown away."""
    min_input_pad: PositiveInt = 16
    """Smallest token bucket of a step that prefills."""
    max_num_seq_buckets: tuple[PositiveInt, ...] | None = None
    """Sequence buckets, ascending. None: powers of two up to `max_num_seqs`."""
    max_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = 20
    """Most alternatives per position that a request may ask for."""
    batch_invariant: bool = False
    """Compute every token in the same program, in a row of its own: tokens and log-probabilities of
    a request are then the same to the last bit alone and in a crowd, with a cold and a warm prefix,
    preempted, in chunks of any size, speculated. One shape is compiled, of `max_num_seqs` tokens
    unless `max_num_batched_tokens` says otherwise, and a step always costs that much."""
    speculative_config: SpeculativeConfig | None = None
    """Propose tokens and confirm several in one step. Outputs are those without it."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of requests without one (with their arrival number folded in)."""
    silent_mode: bool = False
    """No progress bars, no start-up summary."""

    # Prompts that do not fit.
    auto_truncate_prompt: bool = False
    """Cut a prompt that leaves no room for a completion; a server reports the cut in the answer.
    False: refuse the prompt."""
    truncate_mode: Literal["left", "right", "middle"] = "left"
    """The part of a long prompt that `auto_truncate_prompt` removes."""
    auto_cap_new_tokens: bool = True
    """Lower `max_tokens` to what fits; such a completion may end with the reason `length`. False:
    refuse the request."""
    prefer_preserve_prompt: bool = True
    """When both do not fit, lower `max_tokens` first. False: cut the prompt first."""
    reserve_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens of the context that stay free for the completion when a prompt is cut. None: 1."""
    strict_context: bool = False
    """Refuse what does not fit, whatever the four options above say."""

    # Adapters that requests choose by name.
    max_loras: Annotated[int, Field(ge=0, le=2**12)] = 0
    """LoRA adapters that can be loaded at the same time (`load_lora_adapter`). Memory is taken for
    so many of `max_lora_rank` on every layer of `lora_targets`. 0: none, at no cost."""
    max_lora_rank: Annotated[int, Field(gt=0, le=2**12)] = 16
    """Largest rank of a loaded adapter."""
    lora_targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Patterns over the names of linear layers that loaded adapters may change. None: every linear
    layer but the head."""

    # Stops that every request gets.
    extra_eos_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a completion besides the model's own (not with `ignore_eos`)."""
    extra_stops: tuple[str, ...] = ()
    """Stop strings of every request."""

    destroy_pages_on_pause: bool = True
    """`pause()` frees the page pools: all device memory but that of the weights."""

    tokenizer_endpoint: None = None
    """Accepted as null only: the tokenizer runs in the engine's process."""
    detokenizer_endpoint: None = None
    """Accepted as null only: the detokenizer runs in the engine's process."""

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
        if self.kv_offloading_size is not None and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size is for pages of the prefix cache, and enable_prefix_caching is "
                "off: set it to true, or leave kv_offloading_size out"
            )
        if (self.reserve_tokens or 0) >= self.max_model_len:
            raise ValueError(
                f"reserve_tokens {self.reserve_tokens} leaves no room for a prompt "
                f"in max_model_len {self.max_model_len}"
            )
        return self
