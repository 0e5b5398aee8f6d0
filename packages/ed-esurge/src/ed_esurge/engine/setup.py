"""What an `EngineConfig` comes to for a given model and machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ed_infra.logging import get_logger, once

from ed_esurge.config import EngineConfig
from ed_esurge.core.scheduler import Limits
from ed_esurge.runner.buckets import Buckets
from ed_esurge.runner.memory import pool_size
from ed_esurge.runner.model_runner import ModelRunner

logger = get_logger(__name__)

# Tokens of a step when the user names no budget: enough to keep the device busy.
TOKEN_BUDGET = {"cpu": 512, "gpu": 2048, "tpu": 8192}
# Sequences of a step on a CPU when the user names no number.
CPU_SEQS = 16


@dataclass(frozen=True)
class Setup:
    """Effective sizes.

    Attributes:
        limits: the scheduler's.
        buckets: the runner's shapes.
    """

    limits: Limits
    buckets: Buckets

    @classmethod
    def resolve(cls, model: Any, config: EngineConfig) -> Setup:
        """Cap the options at what model and platform can do."""
        longest = config.max_model_len
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and positions < longest:
            once(
                logger,
                f"max_model_len {longest} is beyond the model's {positions} positions: "
                f"using {positions}",
            )
            longest = int(positions)
        platform = model.mesh.devices.flat[0].platform
        budget = config.max_num_batched_tokens or TOKEN_BUDGET.get(platform, 2048)
        seqs = config.max_num_seqs
        if platform == "cpu" and "max_num_seqs" not in config.given:
            seqs = min(seqs, CPU_SEQS)
        seqs = min(seqs, budget)
        # More tokens than all sequences together can have are never in one step.
        budget = max(seqs, min(budget, seqs * longest))
        limits = Limits(
            max_num_seqs=seqs,
            token_budget=budget,
            max_model_len=longest,
            chunk=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
        )
        buckets = Buckets(
            max_num_seqs=seqs,
            max_num_tokens=budget,
            pages=-(-longest // config.page_size),
            min_tokens=config.min_input_pad,
            seq_buckets=config.max_num_seq_buckets,
        )
        return cls(limits, buckets)

    def runner(self, model: Any, config: EngineConfig) -> ModelRunner:
        """The runner, its pool sized by what memory is left."""

        def make(num_pages: int) -> ModelRunner:
            return ModelRunner(
                model,
                self.buckets,
                page_size=config.page_size,
                num_pages=num_pages,
                max_num_seqs=self.limits.max_num_seqs,
                max_logprobs=config.max_logprobs,
                ahead_of_time=config.use_aot_forward,
            )

        def workspace() -> int:
            trial = make(self.buckets.shapes[-1].pages)
            try:
                return trial.workspace_bytes() + trial.state_bytes()
            finally:
                trial.free()

        pages = pool_size(
            model,
            config,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            workspace=workspace,
        )
        return make(pages)


def served_model(model: Any) -> Any:
    """The model as the engine wants it: on a CPU unrolled, which steps up to six times faster."""
    if model.mesh.devices.flat[0].platform == "cpu" and model.layout != "leaves":
        return model.to_layout("leaves")
    return model


def model_name(model: Any) -> str:
    """What the model calls itself: the last part of where it came from, or its type."""
    origin = getattr(model.config, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    return PurePath(origin).name or str(model.config.model_type)


def eos_token_ids(model: Any, tokenizer: Any, extra: tuple[int, ...]) -> frozenset[int]:
    """Every token that ends a text: the checkpoint's, the config's, the tokenizer's, the user's."""
    stored = json.loads(getattr(model, "generation_json", None) or "{}")
    sources = (
        stored.get("eos_token_id"),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    found = set(extra)
    for source in sources:
        if source is not None:
            found.update(source if isinstance(source, list | tuple) else [source])
    return frozenset(int(token) for token in found)
