"""Effective sizes of an engine for an embedding model or a classifier."""

from __future__ import annotations

from dataclasses import dataclass

from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_models.generation.prompts import longest_sequence
from ed_models.protocol import LanguageModel

from ed_esurge.config import EngineConfig
from ed_esurge.core.scheduler import Scheduler, StepLimits
from ed_esurge.engine.setup import CPU_SEQS, TOKEN_BUDGET
from ed_esurge.grammars.store import Grammars
from ed_esurge.model import get_embedding_settings, get_platform
from ed_esurge.runner.encoder_runner import EncoderRunner
from ed_esurge.runner.protocol import Runner

logger = get_logger(__name__)

#: Options for models with keys and values, or with sampling.
_UNSUPPORTED = (
    "speculative_config",
    "kv_offloading_size",
    "batch_invariant",
    "max_loras",
    "enable_prompt_embeds",
)


@dataclass(frozen=True)
class EncoderSetup:
    """Effective sizes of an engine for a model without keys and values; see `Setup`.

    Attributes:
        model: the served model.
        config: the engine's options.
        limits: limits of the scheduler.
    """

    model: LanguageModel
    config: EngineConfig
    limits: StepLimits

    @classmethod
    def resolve(cls, model: LanguageModel, config: EngineConfig) -> EncoderSetup:
        """Limit the options to the capabilities of the model and the platform.

        Raises:
            ConfigError: an option is not supported for encoders.
        """
        for name in _UNSUPPORTED:
            if getattr(config, name):
                raise ConfigError(f"{name} is not supported for an encoder: omit the option")
        settings = get_embedding_settings(model)
        stored = longest_sequence(model.config), settings and settings.max_seq_length
        longest = min([config.max_model_len, *(limit for limit in stored if limit is not None)])
        if longest < config.max_model_len and "max_model_len" in config.model_fields_set:
            once(
                logger,
                f"max_model_len {config.max_model_len} exceeds the model's {longest} tokens: the "
                f"engine uses {longest}",
            )
        platform = get_platform(model)
        seqs = config.max_num_seqs
        if platform == "cpu" and "max_num_seqs" not in config.model_fields_set:
            seqs = min(seqs, CPU_SEQS)
        budget = config.max_num_batched_tokens or TOKEN_BUDGET.get(platform, 2048)
        limits = StepLimits(
            max_num_seqs=seqs,
            token_budget=max(budget, longest, seqs),
            max_model_len=longest,
            policy=config.scheduling_policy,
            whole_prompts=True,
        )
        return cls(model, config, limits)

    def pool_sizes(self) -> dict[str, int]:
        """Return {}: an encoder has no pages."""
        return {}

    def runner(
        self, grammars: Grammars | None = None, sizes: dict[str, int] | None = None
    ) -> EncoderRunner:
        """Create the runner. The arguments are those of `Setup.runner`, and have no effect."""
        return EncoderRunner(
            self.model,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            max_num_batched_tokens=self.limits.token_budget,
        )

    def scheduler(self, runner: Runner) -> Scheduler:
        """Create the scheduler."""
        return Scheduler(
            self.limits, num_pages={}, page_size=self.config.page_size, prefix_caching=False
        )
