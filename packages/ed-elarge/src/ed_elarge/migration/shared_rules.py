"""Rules for the keys of `transformers.TrainingArguments` and PEFT, which several programs have."""

from __future__ import annotations

import re

from ed_infra.errors import ConfigError
from ed_infra.specs import parse_lora_start

from ed_elarge.migration.conversion import (
    Conversion,
    KeyRule,
    copy_to,
    is_true,
    lose,
    omit,
    parse_yaml_number,
    read_later,
    split_names,
    translate_to,
)

#: Optimizer of transformers or bitsandbytes -> optimizer of this project.
OPTIMIZER_NAMES: dict[str, object] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "adamw_apex_fused"),
        "adamw",
    ),
    **dict.fromkeys(("adamw", "paged_adamw_32bit", "paged_adamw", "adamw_bnb_32bit"), "adamw"),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "ao_adamw_8bit"), "adamw_8bit"
    ),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion_8bit"),
    "adafactor": "adafactor",
    "muon": "muon",
    "rmsprop": "rmsprop",
    "sgd": "sgd",
    "schedule_free_adamw": "schedule_free_adamw",
}
#: Scheduler of transformers -> scheduler of this project.
SCHEDULER_NAMES: dict[str, object] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "warmup_stable_decay": "wsd",
}
_SHARDS = "the default mesh shards the model over all devices; sharding.axis_dims changes it"
_KERNELS = "the best attention and the compiled kernels are always used"
_ONE_PROGRAM = "every step is one compiled program"
_TORCH = "a setting of torch and its libraries"
_HUB = "`hf upload ORG/NAME <save_directory>/model` after training"


def _put_checkpointing(conversion: Conversion, key: str, value: object) -> None:
    if value not in (False, "false"):
        path = "base_config.values.gradient_checkpointing"
        conversion.put(path, "nothing_saveable", key)


def _put_dtype(conversion: Conversion, key: str, value: object) -> None:
    if value in (True, "auto", "true", "full"):
        conversion.put("loader.dtype", "bfloat16", key)
    elif key.startswith("b"):
        conversion.values.setdefault("loader.dtype", "float32")


def _put_steps(conversion: Conversion, key: str, value: object) -> None:
    steps = parse_yaml_number(value)
    if not isinstance(steps, int | float) or steps != int(steps):
        raise ConfigError(f"{key}: {value!r} is no whole number")
    if steps > 0:
        conversion.put("trainer.max_training_steps", int(steps), key)


def _put_trackers(conversion: Conversion, key: str, value: object) -> None:
    names = [name for name in split_names(value) if name.lower() not in ("none", "all", "")]
    known = [name for name in names if name in ("wandb", "trackio", "mlflow")]
    if known:
        conversion.put("trainer.report_to", known, key)
    rest = [name for name in names if name not in (*known, "tensorboard")]
    if rest:
        conversion.omitted[key] = f"{', '.join(rest)}: report_to has wandb, trackio and mlflow"


def _put_backend(conversion: Conversion, key: str, value: object) -> None:
    if conversion.read_flag(key):
        conversion.put("platform.backend", "cpu", key)


def _put_progress(conversion: Conversion, key: str, value: object) -> None:
    if conversion.read_flag(key):
        conversion.put("trainer.progress_bar_type", "none", key)


def put_project(conversion: Conversion, key: str, value: object) -> None:
    """Set the project of a tracker, which also selects wandb."""
    if value:
        conversion.put("trainer.report_to", ["wandb"], key)
        conversion.put("trainer.project", str(value), key)


def _put_scheduler_settings(conversion: Conversion, key: str, value: object) -> None:
    settings = dict(value) if isinstance(value, dict) else {}
    rate = conversion.read_number("learning_rate", 0.0)
    for name, number in settings.items():
        if name in ("min_lr", "min_lr_rate") and rate:
            factor = rate if name == "min_lr_rate" else 1.0
            end = float(f"{factor * float(number):.9g}")
            conversion.put("trainer.learning_rate_end", end, f"{key}.{name}")
        elif name == "num_decay_steps":
            conversion.put("trainer.scheduler_kwargs", {name: int(number)}, f"{key}.{name}")
        else:
            conversion.changes[f"{key}.{name}"] = "see trainer.scheduler_kwargs"


def put_adam(conversion: Conversion) -> None:
    """Set the constants of Adam."""
    names = {"adam_beta1": "b1", "adam_beta2": "b2", "adam_epsilon": "eps"}
    given = [key for key in names if key in conversion.source]
    settings = {names[key]: conversion.read_number(key, 0.0) for key in given}
    optimizer = str(conversion.values.get("trainer.optimizer", "adamw"))
    if settings and optimizer.startswith("adamw"):
        conversion.put("trainer.optimizer_kwargs", settings, ", ".join(given))
    elif settings:
        conversion.omitted[given[0]] = f"{optimizer} has no such constants"


def put_warmup(conversion: Conversion) -> None:
    """Set the warm-up: steps, or their share of the run."""
    steps = conversion.read_number("warmup_steps", 0.0)
    ratio = conversion.read_number("warmup_ratio", 0.0)
    if steps > 0:
        whole = int(steps) if steps >= 1 else steps
        conversion.put("trainer.warmup_steps", whole, "warmup_steps")
    elif ratio > 0:
        conversion.put("trainer.warmup_ratio", ratio, "warmup_ratio")


def put_cadence(conversion: Conversion) -> None:
    """Set when the run evaluates and saves."""
    for task, key, path in (
        ("eval", "eval_steps", "trainer.evaluation_steps"),
        ("save", "save_steps", "trainer.save_steps"),
    ):
        strategy = conversion.source.get(f"{task}_strategy")
        strategy = "no" if strategy is False else strategy
        steps = parse_yaml_number(conversion.source.get(key))
        if strategy not in (None, "no", "epoch", "steps", "best"):
            raise ConfigError(f"{task}_strategy: {strategy!r} is none of no, steps, epoch and best")
        if strategy in ("epoch", "no"):
            conversion.put(f"trainer.{task}_strategy", strategy, f"{task}_strategy")
        elif strategy == "best":
            conversion.put("trainer.save_best_k", 1, "save_strategy best")
        elif strategy == "steps" or isinstance(steps, int | float):
            number = steps or conversion.values.get("trainer.log_steps", 500)
            if isinstance(number, int | float) and number > 0:
                whole = int(number) if number >= 1 else number
                conversion.put(path, whole, key)
    if "trainer.save_best_k" in conversion.values:
        for name in ("steps", "strategy"):
            path = "trainer.evaluation_steps" if name == "steps" else "trainer.eval_strategy"
            if path in conversion.values:
                conversion.put(
                    f"trainer.save_{name}", conversion.values[path], "save_strategy best"
                )


def put_batch(conversion: Conversion, size_key: str, default: int) -> None:
    """Set the size of a batch, from the size for each device."""
    accumulation = conversion.read_count("gradient_accumulation_steps", 1)
    size = conversion.read_count(size_key, default)
    devices = conversion.devices
    total = size * accumulation * devices
    origin = f"{size_key} {size} x gradient_accumulation_steps {accumulation} x {devices} devices"
    conversion.put("trainer.total_batch_size", total, f"{origin} (--devices)")
    if accumulation > 1:
        conversion.put("trainer.gradient_accumulation_steps", accumulation, "the same name")
    for key in ("per_device_eval_batch_size", "eval_batch_size"):
        if key in conversion.source:
            total = conversion.read_count(key, 1) * devices
            conversion.put("trainer.eval_batch_size", total, f"{key} x {devices} devices")


def put_hold_out(conversion: Conversion, key: str, value: object) -> None:
    """Set the share of the rows that is held out."""
    share = parse_yaml_number(value)
    if isinstance(share, int | float) and 0 < share < 1:
        conversion.put("mixture.eval_fraction", share, key)
    elif share:
        conversion.changes[key] = f"{value} rows: set mixture.eval_fraction to their share"


def omit_template(conversion: Conversion, key: str, value: object) -> None:
    """Say that a named copy of the model's chat template is not needed."""
    conversion.omitted[key] = (
        f"the chat template of the model is used, not a copy named {value}; a base model "
        "without one needs model.tokenizer.chat_template"
    )


def put_targets(conversion: Conversion, key: str, value: object) -> None:
    """Set the layers with adapters."""
    names = split_names(value)
    if names in (["all-linear"], ["all"]):
        return
    if isinstance(value, str) and re.search(r"[\\^$*+?()|\[\]]", value):
        names = [value]
    if names:
        conversion.put("lora.targets", names, key)


def put_start(conversion: Conversion, key: str, value: object) -> None:
    """Set the initial values of adapters; those that are not computed here are a change."""
    if is_true(value) or value == "":
        return
    try:
        conversion.put("lora.init_lora_weights", parse_lora_start(str(value)), key)
    except ConfigError as error:
        conversion.changes[key] = str(error)


def put_loftq_config(conversion: Conversion, key: str, value: object) -> None:
    """Set the codes of LoftQ; an empty mapping is PEFT's default."""
    if value:
        conversion.put("lora.loftq_config", value, key)


def remove_adapters(conversion: Conversion) -> None:
    """Remove the options of adapters from a run that trains all parameters."""
    for path in [path for path in conversion.values if path.startswith("lora.")]:
        del conversion.values[path]


def put_quantization(conversion: Conversion, key: str, value: object) -> None:
    """Set the format of a frozen base: 4 or 8 bits."""
    bits = {"load_in_4bit": "nf4", "load_in_8bit": "int8", "4": "nf4", "8": "int8"}
    name = bits.get(key if key in bits else str(value))
    if value in (False, None):
        return
    if name is None:
        conversion.changes[key] = f"{value} bits: quantization.model has formats of 4 and 8 bits"
    else:
        conversion.put("quantization.model.quantization_method", name, key)


def put_rewards(conversion: Conversion, key: str, value: object) -> None:
    """Set the reward functions: rules of TRL, or functions of modules."""
    names = {
        "accuracy_reward": "math_answer",
        "think_format_reward": "format",
    }
    rewards: list[object] = []
    for name in split_names(value):
        if name in names:
            rewards.append(names[name])
        elif "." in name:
            module, _, function = name.rpartition(".")
            rewards.append(f"{module}:{function}")
        else:
            rewards.append(name)
            conversion.changes[f"{key} {name}"] = "write module:function"
    conversion.put("trainer.reward_functions", rewards, key)


#: Key of `TrainingArguments` -> its rule. The steps at the end of a conversion read further keys.
TRAINING_RULES: dict[str, KeyRule] = {
    "output_dir": copy_to("trainer.save_directory"),
    "learning_rate": copy_to("trainer.learning_rate"),
    "num_train_epochs": copy_to("trainer.num_train_epochs"),
    "max_steps": KeyRule("trainer.max_training_steps", _put_steps),
    "optim": translate_to("trainer.optimizer", OPTIMIZER_NAMES),
    "lr_scheduler_type": translate_to("trainer.scheduler", SCHEDULER_NAMES),
    "lr_scheduler_kwargs": KeyRule("trainer.scheduler_kwargs", _put_scheduler_settings),
    "weight_decay": copy_to("trainer.weight_decay"),
    "max_grad_norm": copy_to("trainer.clip_grad"),
    "seed": copy_to("trainer.seed"),
    "data_seed": copy_to("mixture.seed"),
    "neftune_noise_alpha": copy_to("trainer.neftune_noise_alpha"),
    "label_smoothing_factor": lose("no method but dpo smooths labels", 0, 0.0),
    "bf16": KeyRule("loader: {dtype: bf16}", _put_dtype),
    "fp16": KeyRule("loader: {dtype: bf16}, which needs no loss scaling", _put_dtype),
    **{
        key: KeyRule(
            "base_config: {values: {gradient_checkpointing: nothing_saveable}}", _put_checkpointing
        )
        for key in ("gradient_checkpointing", "activation_checkpointing")
    },
    "activation_checkpointing_kwargs": omit(_TORCH),
    "use_cpu": KeyRule("the section platform: {backend: cpu}", _put_backend),
    "disable_tqdm": KeyRule("trainer.progress_bar_type: none", _put_progress),
    "optim_args": lose("trainer.optimizer_kwargs, a mapping"),
    "bf16_full_eval": omit("evaluations compute in the dtype of training, loader.dtype"),
    "fp16_full_eval": omit("evaluations compute in the dtype of training, loader.dtype"),
    "auto_find_batch_size": omit("a batch has the given size: `elarge plan` finds one that fits"),
    "logging_nan_inf_filter": omit("a loss that is not finite is an error"),
    "logging_dir": omit("TensorBoard files are in <save_directory>/tensorboard"),
    "full_determinism": omit("trainer.seed determines the batches and all random numbers"),
    "do_predict": omit("the list of actions decides"),
    "logging_steps": copy_to("trainer.log_steps"),
    "logging_strategy": copy_to("trainer.log_strategy"),
    "save_total_limit": copy_to("trainer.save_total_limit"),
    "load_best_model_at_end": copy_to("trainer.load_best_model_at_end"),
    "metric_for_best_model": copy_to("trainer.metric_for_best_model"),
    "greater_is_better": copy_to("trainer.greater_is_better"),
    "eval_on_start": copy_to("trainer.eval_on_start"),
    "run_name": copy_to("trainer.run_name"),
    "project": copy_to("trainer.project"),
    "report_to": KeyRule("trainer.report_to", _put_trackers),
    "trust_remote_code": copy_to("loader.trust_remote_code"),
    "warmup_steps": read_later("trainer.warmup_steps"),
    "warmup_ratio": read_later("trainer.warmup_ratio"),
    "eval_strategy": read_later("trainer.eval_strategy"),
    "eval_steps": read_later("trainer.evaluation_steps"),
    "save_strategy": read_later("trainer.save_strategy"),
    "save_steps": read_later("trainer.save_steps"),
    "adam_beta1": read_later("trainer.optimizer_kwargs.b1"),
    "adam_beta2": read_later("trainer.optimizer_kwargs.b2"),
    "adam_epsilon": read_later("trainer.optimizer_kwargs.eps"),
    "per_device_train_batch_size": read_later("trainer.total_batch_size, over all devices"),
    "per_device_eval_batch_size": read_later("trainer.eval_batch_size, over all devices"),
    "gradient_accumulation_steps": read_later("trainer.gradient_accumulation_steps"),
    "load_in_4bit": KeyRule("quantization: {model: {quantization_method: nf4}}", put_quantization),
    "load_in_8bit": KeyRule("quantization: {model: {quantization_method: int8}}", put_quantization),
    "deepspeed": omit(_SHARDS),
    "fsdp": omit(_SHARDS),
    "fsdp_config": omit(_SHARDS),
    "fsdp_version": omit(_SHARDS),
    "accelerator_config": omit(_SHARDS),
    "parallelism_config": omit(_SHARDS),
    "ddp_timeout": omit("one process for each host runs all of its devices"),
    "gradient_checkpointing_kwargs": omit(_TORCH),
    "attn_implementation": omit(_KERNELS),
    "use_liger_kernel": omit(_ONE_PROGRAM),
    "torch_compile": omit(_ONE_PROGRAM),
    "tf32": omit("loader.precision sets the precision of float32 products"),
    "push_to_hub": omit(_HUB),
    "hub_model_id": omit(_HUB),
    **{
        f"hub_{name}": omit(_HUB)
        for name in ("strategy", "token", "private_repo", "always_push", "revision")
    },
    "group_by_length": omit("mixture.pack_tokens leaves no padding"),
    "length_column_name": omit("mixture.pack_tokens leaves no padding"),
    "train_sampling_strategy": lose(
        "the rows are shuffled: mixture.shuffle_buffer_size", "random", "group_by_length"
    ),
    **{
        f"dataloader_{name}": omit("mixture.prefetch_workers reads ahead")
        for name in (
            *("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context"),
        )
    },
    "preprocessing_num_workers": omit("mixture.tokenization.num_proc"),
    "resume_from_checkpoint": omit("a run continues from its newest checkpoint"),
    "overwrite_output_dir": omit("a run continues from its newest checkpoint"),
    "save_only_model": omit("<save_directory>/model has no optimizer"),
    "do_train": omit("the list of actions has train"),
    "do_eval": omit("eval_strategy and the held-out data decide"),
    "eval_delay": lose("no counterpart: evaluations begin with the first one", 0),
    "optim_target_modules": lose("trainer.learning_rate_rules select parameters"),
    **{
        key: omit("no effect on the result")
        for key in (
            *("log_level", "log_level_replica", "skip_memory_metrics"),
            *("trackio_bucket_id", "trackio_static_space_id", "torchdistx_path"),
        )
    },
    "trackio_space_id": copy_to("trainer.tracker_entity"),
    "label_names": omit("only classifiers have names of labels"),
}
#: Key of PEFT in YAML files -> its rule.
ADAPTER_RULES: dict[str, KeyRule] = {
    "lora_r": copy_to("lora.rank"),
    "lora_rank": copy_to("lora.rank"),
    "lora_alpha": copy_to("lora.alpha"),
    "lora_dropout": copy_to("lora.dropout"),
    "lora_modules_to_save": copy_to("lora.modules_to_save"),
    "lora_target_modules": KeyRule("lora.targets", put_targets),
    "use_dora": copy_to("lora.dora"),
    "use_rslora": copy_to("lora.rslora"),
}
_ADAPTED_LAYERS = "lora.targets, patterns over the names of layers"
#: Argument of `peft.LoraConfig` -> its rule; without one, the default only.
PEFT_RULES: dict[str, KeyRule] = {
    "r": ADAPTER_RULES["lora_r"],
    "lora_alpha": ADAPTER_RULES["lora_alpha"],
    "lora_dropout": ADAPTER_RULES["lora_dropout"],
    "target_modules": ADAPTER_RULES["lora_target_modules"],
    "modules_to_save": ADAPTER_RULES["lora_modules_to_save"],
    "use_dora": ADAPTER_RULES["use_dora"],
    "use_rslora": ADAPTER_RULES["use_rslora"],
    **{
        key: lose(_ADAPTED_LAYERS)
        for key in ("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters")
    },
    "init_lora_weights": KeyRule("lora.init_lora_weights", put_start),
    "loftq_config": KeyRule("lora.loftq_config", put_loftq_config),
    "bias": lose("adapters have no bias", "none"),
    "peft_type": lose("adapters are LoRA", "LORA"),
    **{
        key: omit("no effect on the result")
        for key in (
            *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
            *("inference_mode", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
            *("runtime_config", "ensure_weight_tying"),
        )
    },
}
