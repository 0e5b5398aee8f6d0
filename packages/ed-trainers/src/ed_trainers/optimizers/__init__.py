"""Optimizers: what updates parameters from their gradients, one file an idea.

    schedule = build_schedule(arguments, total_steps)
    tx = build_optimizer(arguments, schedule)

`build_optimizer` joins, from the inside out: a direction (`DIRECTIONS`), decay and learning rates
by rules over canonical names, a running mean of the parameters, float32 masters, clipping, and
skipped steps.
"""

from __future__ import annotations

from ed_trainers.optimizers.build import SCHEDULED, build_optimizer, check_rules, global_norm
from ed_trainers.optimizers.ema import get_ema_params
from ed_trainers.optimizers.groups import decays, get_array_norms, split_layers
from ed_trainers.optimizers.masters import apply_updates, with_masters
from ed_trainers.optimizers.schedule_free import gradient_point
from ed_trainers.optimizers.schedules import Schedule, build_schedule
from ed_trainers.optimizers.skip import was_skipped

__all__ = [
    "SCHEDULED",
    "Schedule",
    "apply_updates",
    "build_optimizer",
    "build_schedule",
    "check_rules",
    "decays",
    "get_array_norms",
    "get_ema_params",
    "global_norm",
    "gradient_point",
    "split_layers",
    "was_skipped",
    "with_masters",
]
