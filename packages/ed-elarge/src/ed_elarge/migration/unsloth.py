"""Files of Unsloth's command line: a rule for each key of its sections, and its defaults."""

from __future__ import annotations

from ed_elarge.migration.conversion import (
    Conversion,
    KeyRule,
    copy_to,
    is_true,
    lose,
    omit,
    parse_yaml_number,
    read_later,
)
from ed_elarge.migration.shared_rules import put_project, put_targets, remove_adapters
from ed_elarge.migration.sources import build_source

_PARTS = "adapters have patterns over the names of layers: lora.targets"


def _put_length(conversion: Conversion, key: str, value: object) -> None:
    steps = parse_yaml_number(value)
    if isinstance(steps, int | float) and steps > 0:
        place = "max_training_steps" if key.endswith("max_steps") else "save_steps"
        conversion.put(f"trainer.{place}", int(steps), key)


def _put_wandb(conversion: Conversion, key: str, value: object) -> None:
    if is_true(conversion.source.get("logging.enable_wandb")):
        put_project(conversion, key, value)


def _put_loftq(conversion: Conversion, key: str, value: object) -> None:
    if is_true(value):
        conversion.put("lora.init_lora_weights", "loftq", key)


#: Key of a file of Unsloth's command line -> its rule.
UNSLOTH_RULES: dict[str, KeyRule] = {
    "model": copy_to("model.name_or_path"),
    "data.dataset": read_later("mixture.informs"),
    "data.local_dataset": read_later("mixture.informs"),
    "data.format_type": read_later("mixture.informs: [{format: alpaca}]"),
    "training.training_type": read_later("lora: {...}, or no such section for full"),
    "training.max_seq_length": copy_to("trainer.max_length"),
    "training.load_in_4bit": read_later("quantization.model: {quantization_method: nf4}"),
    "training.output_dir": copy_to("trainer.save_directory"),
    "training.num_epochs": copy_to("trainer.num_train_epochs"),
    "training.learning_rate": copy_to("trainer.learning_rate"),
    "training.batch_size": read_later("trainer.total_batch_size, over all devices"),
    "training.gradient_accumulation_steps": read_later("trainer.gradient_accumulation_steps"),
    "training.warmup_steps": copy_to("trainer.warmup_steps"),
    "training.max_steps": KeyRule("trainer.max_training_steps", _put_length),
    "training.save_steps": KeyRule("trainer.save_steps", _put_length),
    "training.weight_decay": copy_to("trainer.weight_decay"),
    "training.random_seed": copy_to("trainer.seed"),
    "training.packing": copy_to("mixture.pack_tokens"),
    "training.train_on_completions": copy_to("mixture.tokenization.assistant_only_loss"),
    "training.gradient_checkpointing": read_later("base_config.values.gradient_checkpointing"),
    "lora.lora_r": copy_to("lora.rank"),
    "lora.lora_alpha": copy_to("lora.alpha"),
    "lora.lora_dropout": copy_to("lora.dropout"),
    "lora.target_modules": KeyRule("lora.targets", put_targets),
    "lora.use_rslora": copy_to("lora.rslora"),
    "lora.use_dora": copy_to("lora.dora"),
    "lora.use_loftq": KeyRule("lora.init_lora_weights: loftq", _put_loftq),
    "lora.vision_all_linear": lose(_PARTS),
    "lora.finetune_vision_layers": lose(_PARTS, True),
    "lora.finetune_language_layers": lose(_PARTS, True, False),
    "lora.finetune_attention_modules": lose(_PARTS, True),
    "lora.finetune_mlp_modules": lose(_PARTS, True),
    "logging.enable_wandb": read_later("trainer.report_to: wandb"),
    "logging.wandb_project": KeyRule("trainer.project, with report_to: wandb", _put_wandb),
    "logging.wandb_token": omit("the environment variable WANDB_API_KEY"),
    "logging.hf_token": omit("the environment variable HF_TOKEN"),
    "logging.enable_tensorboard": copy_to("trainer.use_tensorboard"),
    "logging.tensorboard_dir": omit("<save_directory>/tensorboard"),
}
#: Path -> the default of Unsloth's command line.
_DEFAULTS: dict[str, object] = {
    "trainer.max_length": 2048,
    "trainer.learning_rate": 2e-4,
    "trainer.warmup_steps": 5,
    "trainer.weight_decay": 0.01,
    "trainer.seed": 3407,
    "trainer.optimizer": "adamw_8bit",
    "trainer.scheduler": "linear",
    "trainer.clip_grad": 1.0,
    "loader.dtype": "bfloat16",
    "lora.rank": 64,
    "lora.alpha": 16,
    "lora.targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def finish_unsloth(conversion: Conversion) -> None:
    """Set the values that depend on several keys, and the defaults of Unsloth."""
    source, values = conversion.source, conversion.values
    formats = {"alpaca": "alpaca", "sharegpt": "sharegpt"}
    chosen = formats.get(str(source.get("data.format_type")))
    paths = source.get("data.local_dataset") or source.get("data.dataset") or []
    informs = []
    for path in paths if isinstance(paths, list) else [paths]:
        inform = build_source(conversion, "data", {"path": str(path)})
        informs.append(inform | ({"format": chosen} if chosen else {}))
    if not informs:
        conversion.changes["data.dataset"] = "the file names no data set"
        informs = [{"data_files": "ROWS.jsonl"}]
    conversion.put("mixture.informs", informs, "data")
    accumulation = conversion.read_count("training.gradient_accumulation_steps", 4)
    size = conversion.read_count("training.batch_size", 2)
    total = size * accumulation * conversion.devices
    origin = f"batch_size {size} x gradient_accumulation_steps {accumulation} x devices"
    conversion.put("trainer.total_batch_size", total, origin)
    conversion.put("trainer.gradient_accumulation_steps", accumulation, "the same name")
    if source.get("training.gradient_checkpointing") not in (False, "none"):
        path = "base_config.values.gradient_checkpointing"
        conversion.put(path, "nothing_saveable", "training.gradient_checkpointing")
    for path, value in _DEFAULTS.items():
        conversion.put_default(path, value)
    if source.get("training.training_type", "lora") != "lora":
        remove_adapters(conversion)
    elif "lora.init_lora_weights" in values:
        conversion.omitted["training.load_in_4bit"] = "LoftQ computes the codes of the weights"
    elif source.get("training.load_in_4bit") is not False:
        path = "quantization.model.quantization_method"
        conversion.put(path, "nf4", "training.load_in_4bit")
    if "trainer.max_training_steps" not in values:
        conversion.put_default("trainer.num_train_epochs", 3)
    else:
        values.pop("trainer.num_train_epochs", None)
