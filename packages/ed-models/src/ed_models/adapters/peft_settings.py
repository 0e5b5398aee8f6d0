"""The settings of an adapter in PEFT's layout: each is applied here, or the adapter is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError, ConfigError, did_you_mean
from ed_infra.specs import LoraSpec

#: Settings that the numbers of an adapter follow from.
_APPLIED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
        *("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"),
        *("init_lora_weights", "loftq_config"),
    }
)
#: Settings that only select modules, start training, or describe files. The tensors of an adapter
#: determine its modules.
_WITHOUT_EFFECT = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "fan_in_fan_out", "megatron_core"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        # Written by earlier releases of PEFT and by ms-swift.
        *("merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
    }
)
#: Settings that change numbers and are not computed here -> their value without an effect.
_UNSUPPORTED: Mapping[str, object] = {
    "bias": "none",
    "layer_replication": None,
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "trainable_token_indices": None,
    "megatron_config": None,
    "velora_config": None,
    "monteclora_config": None,
    "arrow_config": None,
    "kasa_config": None,
    "ensure_weight_tying": False,
    "enable_lora": None,
}
#: Initial values that leave the weights of the base as they are.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
#: Initial values that PEFT subtracts from the weights of the base when it loads an adapter.
SUBTRACTED_STARTS = ("pissa", "olora")
#: Initial values for which PEFT replaces the weights of the base by codes when it loads an adapter.
_CODES_START = "loftq"


def read_adapter_settings(path: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        CheckpointError: The file is not a JSON object.
        ConfigError: The adapter is not LoRA, or a setting is unknown or not supported.
    """
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise ConfigError(
            f"{path} has the peft_type {kind!r}; adapters of the type 'LORA' are read"
        )
    for name, value in settings.items():
        if name in _APPLIED or name in _WITHOUT_EFFECT or value in (None, False, "", [], {}):
            continue
        if name not in _UNSUPPORTED:
            setting_names = [*_APPLIED, *_WITHOUT_EFFECT, *_UNSUPPORTED]
            raise ConfigError(
                f"{path} has {name}: {value!r}, which is not a setting of PEFT 0.21"
                f"{did_you_mean(name, setting_names)}. The setting may change the numbers of the "
                "adapter: "
                "remove it if it does not, or merge the adapter with the library that wrote it"
            )
        if value != _UNSUPPORTED[name]:
            raise ConfigError(
                f"{path} has {name}: {value!r}, which is not supported; merge the adapter with "
                "PEFT (merge_and_unload) and load the merged model"
            )
    read_start(settings, path)
    return settings


def read_start(settings: Mapping[str, Any], path: Path) -> str | None:
    """Return the initial values that PEFT subtracts from the base, "pissa" or "olora"; or None.

    Raises:
        ConfigError: The adapter was trained on a base that cannot be computed from the weights.
    """
    start = settings.get("init_lora_weights")
    plain_starts = (*_PLAIN_STARTS, _CODES_START)
    if start is None or isinstance(start, bool) or str(start).lower() in plain_starts:
        return None
    if str(start).lower() in SUBTRACTED_STARTS:
        return str(start).lower()
    raise ConfigError(
        f"{path} has init_lora_weights: {start!r}: the adapter was trained on changed weights of "
        "the base, which cannot be computed from the original weights alone. Convert the adapter "
        "to plain LoRA with PEFT (save_pretrained, path_initial_model_for_weight_conversion)"
    )


def get_pattern_value(name: str, patterns: Mapping[str, Any] | None, default: object) -> Any:
    """Return the value of the first pattern that matches the end of a module name, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def build_spec(name: str, rank: int, settings: Mapping[str, Any]) -> LoraSpec:
    """Return rank and scale of one matrix; patterns of names override the settings of all."""
    default_alpha = settings.get("lora_alpha", rank)
    start = settings.get("init_lora_weights")
    over_codes = isinstance(start, str) and start.lower() == _CODES_START
    return LoraSpec(
        rank=rank,
        alpha=get_pattern_value(name, settings.get("alpha_pattern"), default_alpha),
        dropout=settings.get("lora_dropout") or 0.0,
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
        init_lora_weights=_CODES_START if over_codes else True,
        loftq_config=settings.get("loftq_config") if over_codes else None,
    )
