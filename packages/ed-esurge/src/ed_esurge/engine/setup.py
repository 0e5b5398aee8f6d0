"""Effective sizes of an `EngineConfig` for a model and a machine: shapes, limits, memory."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_layers.cache import HybridCache
from ed_layers.moe.layer import Router
from ed_models.generation.prompts import is_encoder_decoder, longest_sequence
from ed_models.modalities.items import EncoderItems, build_encoder_items
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_esurge.config import NOTHING, STATES_PER_SEQUENCE, EngineConfig, Records
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.core.encoder_slots import EncoderSlots
from ed_esurge.core.page_pool import pages_of_sequence
from ed_esurge.core.pages import PageGroup
from ed_esurge.core.proposals import RESTORED_ROWS, Proposer, ReceivedProposals
from ed_esurge.core.scheduler import Scheduler, StepLimits
from ed_esurge.core.state_store import StateStore
from ed_esurge.core.step_time import ONE_STEP, StepTime
from ed_esurge.embedded_prompts import EmbeddedPrompts
from ed_esurge.grammars.store import Grammars
from ed_esurge.model import (
    get_platform,
    get_vocab_size,
    get_windows,
    is_recurrent,
    omits_padding,
    reads_ahead,
)
from ed_esurge.runner.buckets import Buckets
from ed_esurge.runner.draft_model import DRAFT_GROUP
from ed_esurge.runner.drafts import DRAFT_KINDS, check_draft, create_proposer
from ed_esurge.runner.host_pages import COPIES, PAGES_AT_ONCE
from ed_esurge.runner.memory import get_recurrent_caches
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.runner.protocol import Runner

logger = get_logger(__name__)

_GIB = 2**30
# Tokens of a step when the user names no budget: enough to keep the device busy.
TOKEN_BUDGET = {"cpu": 512, "gpu": 2048, "tpu": 8192}
# Tokens of the smallest prefill shape if padding is almost free: the next shapes have 128 and 512.
LEAST_TOKENS = 32
# Default `max_num_seqs` on a CPU.
CPU_SEQS = 16
# Number of rows up to which a step has rows for the proposals of all sequences.
VERIFIED_ROWS = 32
# Entry of the pool sizes with the number of saved recurrent states.
STATES_POOL = "states"
# Minimum number of tokens between two saved states of a sequence.
STATE_SPACING = 64
# Number of tokens between two saved states inside of a long prompt.
STATE_INTERVAL = 1024
# Size of the table of encoder outputs as a multiple of the rows that one step computes.
ENCODER_STEPS = 4


@dataclass(frozen=True)
class Setup:
    """Effective sizes of an engine for a model.

    Attributes:
        model: the served model.
        config: the engine's options.
        limits: limits of the scheduler.
        buckets: shapes of the runner.
        windows: group of layers -> attention window; None = unlimited.
        draft: the draft model, if any.
        encoder: rows of the table of encoder outputs, and rows per step; None = no encoder. For an
            encoder-decoder: maximum encoder positions of a sequence, and positions per step.
        items: the items of the encoder; None for other models.
        records: what outputs contain in addition.
    """

    model: LanguageModel
    config: EngineConfig
    limits: StepLimits
    buckets: Buckets
    windows: dict[str, int | None]
    draft: LanguageModel | None = None
    encoder: tuple[int, int] | None = None
    items: EncoderItems | None = None
    records: Records = NOTHING

    @classmethod
    def resolve(
        cls,
        model: LanguageModel,
        config: EngineConfig,
        draft: LanguageModel | None = None,
        *,
        records: Records = NOTHING,
    ) -> Setup:
        """Limit the options to the capabilities of the model and the platform.

        Raises:
            ConfigError: an end-of-sequence id of the options is outside the vocabulary, or the
                model or an option does not permit to return experts.
        """
        if records.experts:
            _check_experts(model, config)
        if records.masks and config.speculative_config is not None:
            raise ConfigError(
                "speculative_config is not possible while the engine returns sampling masks, "
                "because accepted proposals have none: omit one of the two options"
            )
        vocab = get_vocab_size(model)
        for token in config.extra_eos_token_ids:
            if token >= vocab:
                raise ConfigError(
                    f"extra_eos_token_ids has token id {token}, outside the vocabulary of {vocab}"
                )
        longest = config.max_model_len
        positions = longest_sequence(model.config.get_text_config())
        if positions is not None and positions < longest:
            if "max_model_len" in config.model_fields_set:
                once(
                    logger,
                    f"max_model_len {longest} exceeds the model's {positions} positions: the "
                    f"engine uses {positions}",
                )
            longest = int(positions)
        for name in ("batch_invariant", "kv_offloading_size"):
            if getattr(config, name) not in (None, False) and is_recurrent(model):
                raise ConfigError(
                    f"{name} is for models whose layers read keys and values: a recurrent layer "
                    "of this one has a state, which each token changes; leave the option out"
                )
        if config.num_states is not None and not is_recurrent(model):
            raise ConfigError(
                f"num_states {config.num_states} is for models with recurrent layers, and "
                f"{type(model).__name__} has none: leave the option out"
            )
        platform = get_platform(model)
        if config.kv_offloading_size is not None and platform == "cpu":
            once(
                logger,
                "kv_offloading_size is of no use on a CPU, whose pages are in host memory already: "
                "raise cpu_cache_gib or num_pages instead",
            )
        together = reads_ahead(model)
        budget = config.max_num_batched_tokens or TOKEN_BUDGET.get(platform, 2048)
        if together == "prompt" and config.max_num_batched_tokens is None:
            budget = max(budget, longest)
        seqs = config.max_num_seqs
        if platform == "cpu" and "max_num_seqs" not in config.model_fields_set:
            seqs = min(seqs, CPU_SEQS)
        rows = seqs
        if config.speculative_config is not None:  # those of one sequence fit in any case
            lines = 1 + config.speculative_config.num_speculative_tokens
            # Every step of an engine with `batch_invariant` computes all rows.
            drafting = 1 if config.batch_invariant else seqs
            rows = max(seqs, lines, min(drafting * lines, VERIFIED_ROWS))
        if config.batch_invariant:
            budget = config.max_num_batched_tokens or rows
        seqs, rows = min(seqs, budget), min(rows, budget)
        # A step never has more tokens than all sequences together.
        budget = max(rows, min(budget, seqs * longest))
        items = build_encoder_items(model, longest)
        if config.enable_prompt_embeds:
            items = EmbeddedPrompts(model, longest, budget)
        encoded = is_encoder_decoder(model) or items is not None
        time = ONE_STEP if encoded or any(records) else _time(model, config)
        omits = platform == "cpu" and omits_padding(model)
        buckets = Buckets(
            max_num_seqs=rows,
            max_num_tokens=budget,
            pages=-(-longest // config.page_size),
            min_tokens=_least_tokens(config, omits),
            seq_buckets=config.max_num_seq_buckets,
            invariant=config.batch_invariant,
            steps=time.most,
            drafts=config.speculative_config is not None and is_recurrent(model),
        )
        # On an accelerator, a step of a few tokens is as slow as a step of hundreds, so padding is
        # free.
        follows = platform == "cpu" and not omits and not config.batch_invariant
        follows = follows and together != "prompt"
        shapes = tuple((one.tokens, one.seqs) for one in buckets.prefill) if follows else ()
        limits = StepLimits(
            max_num_seqs=seqs,
            token_budget=budget,
            max_model_len=longest,
            chunk=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            shapes=shapes,
            whole_prompts=together == "prompt",
            time=time,
            max_rows=buckets.max_rows,
        )
        if draft is not None:
            check_draft(model, draft, longest)
        encoder = None
        if is_encoder_decoder(model):
            _check_encoder_decoder(config)
            encoder = (longest, max(budget, longest))
        if together is not None and items is not None:
            _check_together(together, config, limits, items.longest)
        if items is not None:
            encoder = (max(ENCODER_STEPS * budget, items.longest), budget)
        windows = get_windows(model)
        if draft is not None:
            windows.setdefault(DRAFT_GROUP, None)
        return cls(
            *(model, config, limits, buckets, windows, draft, encoder, items),
            records=records,
        )

    def runner(
        self, grammars: Grammars | None = None, sizes: dict[str, int] | None = None
    ) -> ModelRunner:
        """Create the runner.

        Args:
            grammars: compiler of structured outputs, if any.
            sizes: group -> pages of the pools; None = `pool_sizes()`.
        """
        places = self._host_places()
        sizes = dict(self.pool_sizes() if sizes is None else sizes)
        num_states = sizes.pop(STATES_POOL, None)
        return self._runner(sizes, grammars, host_places=places, num_states=num_states)

    def _host_places(self) -> int:
        """Return the number of pages of each group in host memory.

        Raises:
            ConfigError: `kv_offloading_size` is smaller than one page.
        """
        offloading_gib = self.config.kv_offloading_size
        if offloading_gib is None:
            return 0
        models = [self.model] if self.draft is None else [self.model, self.draft]
        caches = [model.init_paged_cache(1, self.config.page_size) for model in models]
        one = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
        if offloading_gib * _GIB < one:
            raise ConfigError(
                f"kv_offloading_size {offloading_gib} GiB holds no page of {self.config.page_size} "
                "tokens, "
                f"which takes {one / _GIB:.3g} GiB: raise it, or leave it out"
            )
        return int(offloading_gib * _GIB) // one

    def _shares_prefixes(self) -> bool:
        """Return whether equal prefixes share pages and states."""
        caching = self.config.enable_prefix_caching
        reasons = {
            "the keys of a prompt depend on all its tokens": reads_ahead(self.model) == "prompt",
            "a page does not contain the experts of its tokens": self.records.experts,
        }
        for reason in (reason for reason, holds in reasons.items() if caching and holds):
            caching = False
            if "enable_prefix_caching" in self.config.model_fields_set:
                once(logger, f"enable_prefix_caching is off for this model: {reason}")
        return caching

    def scheduler(self, runner: Runner) -> Scheduler:
        """Create the scheduler for the pools of a runner."""
        states, page_size = None, self.config.page_size
        if runner.num_states is not None:
            states = StateStore(
                runner.num_states,
                self.limits.max_num_seqs,
                page_size,
                spacing=STATE_SPACING,
                interval=STATE_INTERVAL,
            )
        groups = {
            name: PageGroup(pages, self.windows[name]) for name, pages in runner.num_pages.items()
        }
        return Scheduler(
            self.limits,
            num_pages=groups,
            page_size=page_size,
            prefix_caching=self._shares_prefixes(),
            host_places=0 if runner.host is None else runner.host.places,
            proposer=self._proposer(runner),
            second_states=self.limits.max_num_seqs + (runner.num_states or 0)
            if self.buckets.drafts
            else None,
            encoder=self._encoder_outputs(),
            states=states,
        )

    def _encoder_outputs(self) -> EncoderCache | EncoderSlots | None:
        if self.encoder is None:
            return None
        if self.encoder_length is not None:
            return EncoderSlots(*self.encoder)
        return EncoderCache(*self.encoder, whole_items=reads_ahead(self.model) == "image")

    @property
    def encoder_length(self) -> int | None:
        """Maximum encoder positions of a sequence of an encoder-decoder; None for other models."""
        if self.encoder is None or not is_encoder_decoder(self.model):
            return None
        return self.encoder[0]

    def _proposer(self, runner: Runner) -> Proposer | None:
        """Create the source of proposed tokens, or return None without speculation."""
        config = self.config.speculative_config
        if config is None or self.draft is None:
            return None if config is None else create_proposer(config)
        if not isinstance(runner, ModelRunner):
            # Every process plans the same number of proposals.
            most = config.num_speculative_tokens
            return ReceivedProposals(most, adapts=config.adaptive_length)
        pages = {DRAFT_GROUP: runner.num_pages[DRAFT_GROUP]}
        places = 0 if runner.host is None else runner.host.places
        draft_runner = self._runner(pages, model=self.draft, host_places=places)
        if runner.host is not None:
            runner.host.draft = draft_runner.host
        follow = DRAFT_KINDS[config.method].follow
        assert follow is not None, "a kind with a draft model follows its runner"
        return follow(draft_runner, runner, config, self.limits.token_budget)

    def _runner(
        self,
        num_pages: dict[str, int],
        grammars: Grammars | None = None,
        *,
        model: LanguageModel | None = None,
        host_places: int = 0,
        num_states: int | None = None,
    ) -> ModelRunner:
        return ModelRunner(
            model or self.model,
            self.buckets if model is None else self.buckets.without_drafts(),
            grammars=grammars,
            host_places=host_places,
            num_states=num_states,
            **self.get_runner_options(num_pages, is_draft=model is not None),
        )

    def get_runner_options(
        self, num_pages: dict[str, int], *, is_draft: bool = False
    ) -> dict[str, Any]:
        """Return the keyword arguments of a runner that follow from the sizes."""
        items = None if is_draft else self.items
        rows = 0 if items is None or self.encoder is None else self.encoder[0]
        speculative_config = self.config.speculative_config
        reads_hidden = (
            is_draft
            and speculative_config is not None
            and DRAFT_KINDS[speculative_config.method].reads_hidden
        )
        return {
            "page_size": self.config.page_size,
            "num_pages": num_pages,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_logprobs": self.config.max_logprobs,
            "ahead_of_time": self.config.use_aot_forward,
            "encoder_rows": rows,
            "items": items,
            "encoder_length": None if is_draft else self.encoder_length,
            "second_states": bool(self.buckets.drafts) and not is_draft,
            "hidden_rows": self.buckets.shapes[-1].tokens + RESTORED_ROWS if reads_hidden else 0,
            "most_drafts": speculative_config.num_speculative_tokens
            if is_draft and speculative_config is not None
            else 0,
            "records": self.records,
        }

    def pool_sizes(self) -> dict[str, int]:
        """Return the number of pages of each group's pool, and of saved states (`STATES_POOL`).

        On an accelerator, the pools use `hbm_utilization` of the memory, minus the memory in use
        and the workspace of the largest step. The device of this process with the least free memory
        determines the sizes. On a CPU, the pools use `cpu_cache_gib`. The pools hold at least one
        sequence of `max_model_len` and at most `max_num_seqs` such sequences.

        Raises:
            ConfigError: the memory is too small for one sequence.
        """
        config, limits = self.config, self.limits
        longest, size = limits.max_model_len, config.page_size
        at_once = min(limits.chunk or limits.token_budget, limits.token_budget)
        needed = {
            name: pages_of_sequence(window, longest, at_once, size)
            for name, window in self.windows.items()
        }
        # The index of a token in the pool has 32 bits.
        most = {
            name: min(pages * limits.max_num_seqs, (2**31 - 1) // size)
            for name, pages in needed.items()
        }
        if config.num_pages is not None and needed:
            for pages in needed.values():
                if config.num_pages < pages:
                    raise ConfigError(
                        f"num_pages {config.num_pages} of {size} tokens cannot hold one "
                        f"sequence of max_model_len {longest}: give at least {pages}"
                    )
            pools = {
                name: config.num_pages if window is None else min(config.num_pages, most[name])
                for name, window in self.windows.items()
            }
            pool_bytes = sum(page_bytes(self.model, size, name) * pools[name] for name in pools)
            return {**pools, **self._states_pool(pool_bytes // 2)}
        bytes_per_page = {name: page_bytes(self.model, size, name) for name in needed}
        if self.draft is not None:
            bytes_per_page[DRAFT_GROUP] += page_bytes(self.draft, size)
        bytes_per_sequence = sum(needed[name] * bytes_per_page[name] for name in needed)
        memory = accelerator_memory(self.model)
        if not memory:
            free = int(config.cpu_cache_gib * _GIB)
        else:
            usable_bytes, limit = min(
                (int(limit * config.hbm_utilization) - used, limit) for limit, used in memory
            )
            free = usable_bytes - self._workspace(needed)
            if free < bytes_per_sequence:
                raise ConfigError(
                    f"hbm_utilization {config.hbm_utilization} of {limit / _GIB:.1f} GiB leaves "
                    f"{max(free, 0) / _GIB:.2f} GiB for pages, but one sequence of max_model_len "
                    f"{longest} takes {bytes_per_sequence / _GIB:.2f} GiB: lower max_model_len or "
                    "max_num_batched_tokens, or raise hbm_utilization"
                )
        most_bytes = sum(most[name] * bytes_per_page[name] for name in needed)
        for_states = max(free // 3, free - most_bytes)
        if memory:
            for_states = min(for_states, free - bytes_per_sequence)
        states_pool = self._states_pool(for_states)
        free -= sum(states_pool.values()) * self._state_bytes()
        return {
            **states_pool,
            **{
                name: max(pages, min(most[name], pages * free // bytes_per_sequence))
                for name, pages in needed.items()
            },
        }

    def _states_pool(self, free: int) -> dict[str, int]:
        """Return the number of saved states; {} without recurrent layers or shared prefixes.

        Args:
            free: bytes for the states, if their number is not an option.
        """
        if not is_recurrent(self.model) or not self._shares_prefixes():
            return {}
        count = self.config.num_states
        if count is None:
            most = STATES_PER_SEQUENCE * self.limits.max_num_seqs
            count = min(most, max(free, 0) // self._state_bytes())
        return {STATES_POOL: count}

    def _state_bytes(self) -> int:
        """Return the bytes of a recurrent state, on the device with the largest share."""
        if not is_recurrent(self.model):
            return 0
        cache = self.model.init_paged_cache(1, self.config.page_size, num_states=1)
        return device_bytes([*get_recurrent_caches(cache).values()])

    def _workspace(self, num_pages: dict[str, int]) -> int:
        """Return the bytes that a step needs in addition to weights and pages."""
        trial, copies = self._runner(num_pages), 0
        if self.config.kv_offloading_size is not None:
            copied = [page_bytes(self.model, self.config.page_size, group) for group in num_pages]
            if self.draft is not None:
                copied.append(page_bytes(self.draft, self.config.page_size))
            copies = COPIES * PAGES_AT_ONCE * sum(copied)
        try:
            return trial.functions.workspace_bytes() + trial.memory.state_bytes() + copies
        finally:
            trial.free()


def _least_tokens(config: EngineConfig, omits: bool) -> int:
    """Return the token count of the smallest prefill shape. If padding is almost free, more of it
    in short prompts is better than more of it in prompts of a usual length."""
    is_set = "min_input_pad" in config.model_fields_set
    return config.min_input_pad if is_set or not omits else max(config.min_input_pad, LEAST_TOKENS)


def _time(model: LanguageModel, config: EngineConfig) -> StepTime:
    """Return the estimated time of a decode step, with the limit of `num_scheduler_steps`."""
    if config.batch_invariant or config.speculative_config is not None:
        return ONE_STEP
    if config.num_scheduler_steps is not None:
        return StepTime(config.num_scheduler_steps)
    leaves = jax.tree.leaves(nnx.state(cast(nnx.Module, model)))
    pages = [page_bytes(model, config.page_size, group) for group in get_windows(model)]
    return StepTime.estimate(
        get_platform(model),
        layers=model.config.get_text_config().num_hidden_layers,
        weights=sum(leaf.nbytes for leaf in leaves),
        numbers=sum(leaf.size for leaf in leaves),
        token_bytes=sum(pages) / config.page_size,
    )


def _check_experts(model: LanguageModel, config: EngineConfig) -> None:
    """Check that the engine can return the experts of each token.

    Raises:
        ConfigError: the model has no experts, or does not return them, or an option skips tokens.
    """
    if not any(isinstance(part, Router) for _, part in nnx.iter_modules(cast(nnx.Module, model))):
        raise ConfigError(f"{type(model).__name__} has no experts to return: omit the option")
    if "output_routed_experts" not in inspect.signature(type(model).__call__).parameters:
        raise ConfigError(
            f"{type(model).__name__} does not return the experts of its tokens: use the language "
            "model of its family without an encoder, or omit the option"
        )
    for name in ("speculative_config", "kv_offloading_size"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is not possible while the engine returns experts, because each token must "
                "be computed once by this model: omit one of the two options"
            )


def _check_encoder_decoder(config: EngineConfig) -> None:
    """Raise ConfigError for options that the engine does not support for encoder-decoders."""
    for name in ("max_loras", "speculative_config", "kv_offloading_size", "batch_invariant"):
        if getattr(config, name):
            raise ConfigError(f"{name} is not supported for an encoder-decoder: omit the option")


def tokens_together(limits: StepLimits) -> int:
    """Return the number of prompt tokens for which a step has room in every case."""
    room = limits.token_budget - limits.max_num_seqs + 1
    return min(limits.chunk or room, room)


def _check_together(
    together: Literal["image", "prompt"], config: EngineConfig, limits: StepLimits, image: int
) -> None:
    """Check the options for a model whose tokens attend to later ones.

    Args:
        together: see `reads_ahead`.
        config: the engine's options.
        limits: limits of a step.
        image: number of tokens of an image.

    Raises:
        ConfigError: a step has no room for an image or a prompt, or each token is a step's row.
    """
    if config.batch_invariant:
        raise ConfigError(
            "batch_invariant computes each token separately, but tokens of this model attend to "
            "later ones: omit the option"
        )
    if together == "prompt":
        needed, unit = limits.max_model_len, "a prompt of max_model_len"
        room = min(limits.chunk or limits.token_budget, limits.token_budget)
    else:
        needed, unit, room = image, "an image", tokens_together(limits)
    if room < needed:
        raise ConfigError(
            f"a step computes all tokens of {unit} together, {needed} tokens, but has room for "
            f"{room}: raise max_num_batched_tokens ({limits.token_budget}), or lower max_num_seqs "
            f"({limits.max_num_seqs}) or max_model_len; omit long_prefill_token_threshold"
        )


def page_bytes(model: LanguageModel, page_size: int, group: str = "full") -> int:
    """Return the bytes of one page over all layers of a group, on the device with the largest
    share; 0 if only a draft model has the group."""
    length = 1 if is_encoder_decoder(model) else None
    cache = model.init_paged_cache(1, page_size, num_states=1, encoder_length=length)
    part = cache.caches.get(group, ()) if isinstance(cache, HybridCache) else cache
    return device_bytes(part)


def device_bytes(tree: object) -> int:
    """Return the bytes of arrays per device: the sum of their largest shards."""
    leaves = jax.tree.leaves(tree)
    return sum(max(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in leaves)


def accelerator_memory(model: LanguageModel) -> list[tuple[int, int]]:
    """Return `(limit, in use)` in bytes for each local device of the model; [] for a CPU."""
    memory: list[tuple[int, int]] = []
    for device in model.config.mesh.local_devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats is None or "bytes_limit" not in stats:
            return []
        memory.append((stats["bytes_limit"], stats["bytes_in_use"]))
    return memory
