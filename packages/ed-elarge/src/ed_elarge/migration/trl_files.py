"""Files of TRL's command line: a rule for each key, and the defaults of its configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ed_elarge.migration.conversion import (
    Conversion,
    KeyRule,
    copy_to,
    lose,
    omit,
    read_later,
    split_names,
    translate_to,
)
from ed_elarge.migration.shared_rules import (
    ADAPTER_RULES,
    TRAINING_RULES,
    put_adam,
    put_batch,
    put_cadence,
    put_rewards,
    put_warmup,
    remove_adapters,
)
from ed_elarge.migration.sources import build_source
from ed_elarge.migration.trl_arguments import TRL_METHODS

#: Method -> keys that only its configuration has.
METHOD_KEYS: dict[str, frozenset[str]] = {
    "grpo": frozenset(
        ("num_generations", "reward_funcs", "reward_model_name_or_path", "scale_rewards")
    ),
    "kto": frozenset(("desirable_weight", "undesirable_weight")),
    "reward": frozenset(("center_rewards_coefficient",)),
    "distillation": frozenset(("teacher_model_name_or_path",)),
    "dpo": frozenset(("precompute_ref_log_probs", "f_divergence_type", "discopop_tau")),
    "sft": frozenset(
        ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field")
    ),
}
#: Arguments whose defaults differ from those of this project.
_DEFAULT_ARGUMENTS = (
    *("learning_rate", "max_length", "beta", "num_generations", "max_completion_length"),
)
_DEFAULTS: dict[str, object] = {
    "trainer.scheduler": "linear",
    "trainer.weight_decay": 0.0,
    "trainer.clip_grad": 1.0,
    "loader.dtype": "bfloat16",
}


def find_trl_method(source: Mapping[str, object]) -> str | None:
    """Return the method whose keys a file has; None: the keys name no method."""
    return next((name for name, keys in METHOD_KEYS.items() if keys & source.keys()), None)


def _put_loss(conversion: Conversion, key: str, value: object) -> None:
    losses = split_names(value)
    if conversion.method == "dpo" and len(losses) > 1:
        conversion.put("trainer.loss_type", losses, key)
    elif len(losses) > 1:
        conversion.changes[key] = f"{', '.join(losses)}: a run of this method has one loss"
    elif conversion.method == "reward" and losses[0] != "sigmoid":
        conversion.changes[key] = f"{losses[0]}: {conversion.method} has one loss"
    elif losses[0] not in ("nll", "chunked_nll", "kto", "sigmoid"):
        conversion.put("trainer.loss_type", losses[0], key)


def _put_loss_weights(conversion: Conversion, key: str, value: object) -> None:
    if conversion.method == "dpo":
        conversion.put("trainer.loss_weights", value, key)
    else:
        conversion.changes[key] = "a run of this method has one loss"


def _put_peft(conversion: Conversion, key: str, value: object) -> None:
    if conversion.read_flag(key):
        for path, default in (("lora.rank", 16), ("lora.alpha", 32), ("lora.dropout", 0.05)):
            conversion.put_default(path, default)


def _put_revision(conversion: Conversion, key: str, value: object) -> None:
    if value != "main":
        conversion.put("model.extra_kwargs.revision", value, key)


def _put_dtype(conversion: Conversion, key: str, value: object) -> None:
    name = str(value).rpartition(".")[2]  # a dtype of torch is `torch.bfloat16`
    if name in ("float32", "bfloat16", "float16"):
        conversion.put("loader.param_dtype", name, key)


def _put_turns(conversion: Conversion, key: str, value: object) -> None:
    """Set the limit of messages, which counts the message without calls, too."""
    if value is not None:
        conversion.put("trainer.max_turns", int(str(value)) + 1, key)


def _put_model_arguments(conversion: Conversion, key: str, value: object) -> None:
    for name, item in dict(value).items() if isinstance(value, Mapping) else ():
        rule = MODEL_RULES.get(name)
        if item is None:
            continue
        if rule is None:
            conversion.changes[f"{key}.{name}"] = "see the sections model and loader"
        else:
            rule.convert(conversion, f"{key}.{name}", item)


def put_bits(conversion: Conversion, key: str, value: object) -> None:
    """Set the quantization format of a `BitsAndBytesConfig`, or of its mapping."""
    get_values = getattr(value, "to_dict", None)
    values = value if get_values is None else get_values()
    for name, item in dict(values).items() if isinstance(values, Mapping) else ():
        rule = _BITS_RULES.get(name)
        if rule is not None and item:
            rule.convert(conversion, name, item)
    if isinstance(values, Mapping) and not any(values.get(name) for name in _BIT_COUNTS):
        conversion.changes[key] = "quantization.model has formats of 4 and 8 bits"


def _put_packing(conversion: Conversion, key: str, value: object) -> None:
    if conversion.read_flag(key):
        conversion.put("mixture.pack_tokens", True, key)


def _put_strategy(conversion: Conversion, key: str, value: object) -> None:
    if conversion.read_flag("packing"):
        conversion.put("mixture.pack_strategy", str(value).replace("bfd_split", "bfd"), key)


def _put_completion_loss(conversion: Conversion, key: str, value: object) -> None:
    if value is False:
        conversion.changes[key] = "rows with a prompt and a completion have no loss on the prompt"


def _put_template(conversion: Conversion, key: str, value: object) -> None:
    is_template = str(value).endswith((".jinja", ".jinja2"))
    end = "chat_template" if is_template else "name_or_path"
    conversion.put(f"model.tokenizer.{end}", str(value), key)


def _put_text_field(conversion: Conversion, key: str, value: object) -> None:
    if conversion.method == "sft":
        conversion.put("content_field", str(value), key)


#: Key of a file of TRL's command line -> its rule.
TRL_RULES: dict[str, KeyRule] = {
    **TRAINING_RULES,
    **ADAPTER_RULES,
    "model_name_or_path": copy_to("model.name_or_path"),
    "model_revision": KeyRule("model.extra_kwargs.revision", _put_revision),
    "dtype": KeyRule("loader.param_dtype", _put_dtype),
    "torch_dtype": KeyRule("loader.param_dtype", _put_dtype),
    "use_peft": KeyRule("lora: {rank: 16, alpha: 32, dropout: 0.05}", _put_peft),
    "lora_task_type": omit("the task of the model is used"),
    "lora_target_parameters": lose("lora.targets, patterns over the names of layers"),
    "bnb_4bit_quant_type": translate_to(
        "quantization.model.quantization_method", {"nf4": None, "fp4": "mxfp4"}
    ),
    "bnb_4bit_quant_storage": omit("codes are stored in their own dtype"),
    "use_bnb_nested_quant": copy_to("quantization.model.double_quantization"),
    **{
        key: read_later("mixture: {informs: [{type: ORG/NAME}]}")
        for key in ("dataset_name", "datasets")
    },
    "dataset_config": read_later("mixture: {informs: [{dataset_split_name: NAME}]}"),
    "dataset_train_split": read_later("mixture: {informs: [{split: train}]}"),
    "dataset_test_split": read_later("mixture: {eval_informs: [{type: ORG/NAME, split: test}]}"),
    "dataset_streaming": copy_to("mixture.streaming"),
    "streaming": copy_to("mixture.streaming"),
    "test_split_size": copy_to("mixture.eval_fraction"),
    "dataset_text_field": KeyRule("mixture.informs: [{content_field: text}]", _put_text_field),
    "dataset_num_proc": copy_to("mixture.tokenization.num_proc"),
    "dataset_kwargs": lose("the keys of the section mixture"),
    "max_length": copy_to("trainer.max_length"),
    "max_seq_length": copy_to("trainer.max_length"),
    "max_prompt_length": copy_to("trainer.max_prompt_length"),
    "max_completion_length": copy_to("trainer.max_completion_length"),
    "packing": KeyRule("mixture.pack_tokens", _put_packing),
    "packing_strategy": KeyRule("mixture.pack_strategy", _put_strategy),
    "padding_free": omit("mixture.pack_tokens leaves no padding"),
    "eval_packing": omit("held-out texts are packed as the others"),
    "pad_to_multiple_of": omit("rows have one length, so that one program computes them"),
    "assistant_only_loss": copy_to("mixture.tokenization.assistant_only_loss"),
    "completion_only_loss": KeyRule(
        "omit it: rows with a prompt and a completion have loss on the completion only",
        _put_completion_loss,
    ),
    "chat_template_path": KeyRule("model.tokenizer.name_or_path", _put_template),
    "eos_token": lose("model.tokenizer: a folder with a tokenizer with this token"),
    "pad_token": omit("padding has no token of its own in the loss"),
    "truncation_mode": translate_to(
        "mixture.tokenization.truncation", {"keep_start": None, "keep_end": "left"}
    ),
    "shuffle_dataset": omit("the rows are always shuffled"),
    "model_init_kwargs": KeyRule("the sections model and loader", _put_model_arguments),
    "teacher_model_init_kwargs": lose("the section teacher_model"),
    "vllm_structured_outputs_regex": lose("no counterpart"),
    "max_tool_calling_iterations": KeyRule("trainer.max_turns", _put_turns),
    "padding_value": omit("padding has no token of its own in the loss"),
    "generate_during_eval": lose("trainer.generation_prompts and generation_interval"),
    "is_encoder_decoder": omit("the configuration of the model decides"),
    "disable_dropout": omit("dropout is that of the model's configuration"),
    "activation_offloading": omit("no effect on the result"),
    "router_aux_loss_coef": copy_to("base_config.values.router_aux_loss_coef"),
    "loss_type": KeyRule("trainer.loss_type", _put_loss),
    "loss_weights": KeyRule("trainer.loss_weights", _put_loss_weights),
    "beta": copy_to("trainer.beta"),
    "label_smoothing": copy_to("trainer.label_smoothing"),
    "discopop_tau": copy_to("trainer.discopop_tau"),
    "precompute_ref_log_probs": copy_to("trainer.precompute_ref_log_probs"),
    "precompute_ref_batch_size": omit("trainer.eval_batch_size"),
    "f_divergence_type": copy_to("trainer.f_divergence_type"),
    "f_alpha_divergence_coef": copy_to("trainer.f_alpha_divergence_coef"),
    "ld_alpha": copy_to("trainer.ld_alpha"),
    "use_weighting": copy_to("trainer.use_weighting"),
    "sync_ref_model": copy_to("trainer.sync_ref_model"),
    "ref_model_mixup_alpha": copy_to("trainer.ref_model_mixup_alpha"),
    "ref_model_sync_steps": copy_to("trainer.ref_model_sync_steps"),
    "desirable_weight": copy_to("trainer.desirable_weight"),
    "undesirable_weight": copy_to("trainer.undesirable_weight"),
    "center_rewards_coefficient": copy_to("trainer.center_rewards_coefficient"),
    "teacher_model_name_or_path": copy_to("teacher_model.name_or_path"),
    "teacher_model_revision": copy_to("teacher_model.revision"),
    "reward_funcs": KeyRule("trainer.reward_functions", put_rewards),
    "reward_model_name_or_path": copy_to("reward_model.name_or_path"),
    "reward_weights": copy_to("trainer.reward_weights"),
    "num_generations": copy_to("trainer.num_return_sequences"),
    "num_generations_eval": omit("an evaluation samples num_generations completions"),
    "steps_per_generation": read_later("trainer.steps_per_generation, in optimizer steps"),
    "generation_batch_size": read_later("trainer.steps_per_generation, in optimizer steps"),
    "num_iterations": copy_to("trainer.num_iterations"),
    "temperature": copy_to("trainer.temperature"),
    "top_p": copy_to("trainer.top_p"),
    "top_k": copy_to("trainer.top_k"),
    "min_p": copy_to("trainer.min_p"),
    "repetition_penalty": lose("completions are samples of the model's distribution", 1, 1.0),
    "generation_kwargs": lose("trainer.temperature, top_p, top_k and min_p"),
    "chat_template_kwargs": lose("the field chat_template_kwargs of a row"),
    "epsilon": copy_to("trainer.epsilon"),
    "epsilon_high": copy_to("trainer.epsilon_high"),
    "delta": copy_to("trainer.delta"),
    "scale_rewards": copy_to("trainer.scale_rewards"),
    "importance_sampling_level": copy_to("trainer.importance_sampling_level"),
    "mask_truncated_completions": copy_to("trainer.mask_truncated_completions"),
    "normalize_advantages": copy_to("trainer.normalize_advantages"),
    "use_bias_correction_kl": omit("only for completions of other weights"),
    "vllm_gpu_memory_utilization": copy_to("esurge.hbm_utilization"),
    "vllm_max_model_length": copy_to("esurge.max_model_len"),
    **{
        key: omit("the engine of this project samples completions with the trained weights")
        for key in (
            *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode"),
            *("vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
            *("vllm_server_timeout", "vllm_group_port", "vllm_tensor_parallel_size"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
            *("vllm_importance_sampling_clip_min", "use_transformers_paged"),
            *("cache_implementation", "ds3_gather_for_generation", "log_completions"),
            *("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
            *("use_transformers_continuous_batching", "cast_lm_head_to_fp32"),
            *("transformers_continuous_batching_config", "log_completions_hub_repo"),
        )
    },
    "multi_objective_aggregation": lose("trainer.reward_weights", "sum_then_normalize"),
    **{
        key: copy_to(f"trainer.{key}")
        for key in (
            *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos"),
            *("vespo_lambda_neg", "vespo_lambda_pos", "off_policy_mask_threshold"),
            *("entropy_coef", "use_adaptive_entropy", "entropy_target", "entropy_coef_delta"),
            *("entropy_coef_min", "entropy_coef_max", "top_entropy_quantile"),
        )
    },
    "ignore_bias_buffers": omit("no effect on the result"),
    "logging_first_step": omit("the first step always has a row of metrics"),
    "remove_unused_columns": omit("only the named fields of a row are read"),
    "ddp_find_unused_parameters": omit("one process for each host runs all of its devices"),
}
#: Keyword of `from_pretrained` of transformers -> its rule.
MODEL_RULES: dict[str, KeyRule] = {
    "dtype": TRL_RULES["dtype"],
    "torch_dtype": TRL_RULES["dtype"],
    "revision": TRL_RULES["model_revision"],
    "trust_remote_code": TRL_RULES["trust_remote_code"],
    "load_in_4bit": TRL_RULES["load_in_4bit"],
    "load_in_8bit": TRL_RULES["load_in_8bit"],
    "quantization_config": KeyRule("quantization.model", put_bits),
    "attn_implementation": TRL_RULES["attn_implementation"],
    "num_labels": lose("the method decides about the labels", 1),
    "token": omit("the environment variable HF_TOKEN"),
    **{
        key: omit("the model is loaded into the shards of its mesh")
        for key in (
            *("device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "tp_plan"),
            *("use_safetensors", "local_files_only", "cache_dir", "use_cache"),
        )
    },
}
#: Keys of `BitsAndBytesConfig` with a number of bits.
_BIT_COUNTS = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")
_BITS_RULES: dict[str, KeyRule] = {
    "load_in_4bit": TRL_RULES["load_in_4bit"],
    "load_in_8bit": TRL_RULES["load_in_8bit"],
    "bnb_4bit_quant_type": TRL_RULES["bnb_4bit_quant_type"],
    "bnb_4bit_use_double_quant": TRL_RULES["use_bnb_nested_quant"],
}


def _find_text_field(conversion: Conversion, inform: Mapping[str, object]) -> str | None:
    """Return TRL's default field of texts, if the first row of a file of JSON lines has it."""
    path = conversion.folder / str(inform.get("data_files"))
    if path.suffix != ".jsonl" or not path.is_file():
        conversion.omitted["dataset_text_field"] = (
            "for rows with a text, set content_field: text; chats and completions need no key"
        )
        return None
    with path.open(encoding="utf-8") as file:
        line = file.readline(10_000_000)
    try:
        row = json.loads(line)
    except ValueError:
        return None  # the dry run names the line
    return "text" if isinstance(row, dict) and "text" in row else None


def _put_datasets(conversion: Conversion) -> None:
    source = conversion.source
    entries = source.get("datasets")
    if not isinstance(entries, list):
        entries = [
            {
                "path": source.get("dataset_name"),
                "name": source.get("dataset_config"),
                "split": source.get("dataset_train_split"),
            }
        ]
        if source.get("dataset_name") is None:
            conversion.changes["dataset_name"] = "the file names no data set"
            entries = [{"path": "ROWS.jsonl"}]
    field = conversion.values.pop("content_field", None)
    conversion.origins.pop("content_field", None)
    informs = []
    for number, entry in enumerate(entries):
        given = dict(entry) if isinstance(entry, Mapping) else {"path": str(entry)}
        inform = build_source(conversion, f"datasets[{number}]", given)
        if given.get("columns"):
            conversion.omitted[f"datasets[{number}].columns"] = "only the needed fields are read"
        if conversion.method == "sft" and field is None:
            field = _find_text_field(conversion, inform)
        if "math_answer" in split_names(conversion.values.get("trainer.reward_functions", [])):
            # `accuracy_reward` of TRL reads the column `solution`.
            inform |= {"format_fields": {"solution": "answer"}, "additional_fields": ["answer"]}
        informs.append(inform | ({"content_field": field} if field else {}))
    conversion.put("mixture.informs", informs, "datasets, dataset_name")
    evaluates = source.get("eval_strategy") not in (None, "no", False)
    if (
        evaluates
        and source.get("dataset_name")
        and "mixture.eval_fraction" not in conversion.values
    ):
        split = str(source.get("dataset_test_split") or "test")
        entry = {"path": source["dataset_name"], "name": source.get("dataset_config")}
        inform = build_source(conversion, "dataset_test_split", {**entry, "split": split})
        if "split" in inform:
            inform |= {"content_field": field} if field else {}
            conversion.put("mixture.eval_informs", [inform], "dataset_test_split")
        else:
            conversion.changes["dataset_test_split"] = (
                "a file has one split: set mixture.eval_informs or mixture.eval_fraction"
            )


def _list_defaults(method: str) -> dict[str, object]:
    """Return the defaults of TRL for a method: path -> value."""
    defaults = next((one.defaults for one in TRL_METHODS.values() if one.method == method), {})
    values = {
        TRL_RULES[name].place: defaults[name]
        for name in _DEFAULT_ARGUMENTS
        if defaults.get(name) is not None
    }
    if "center_rewards_coefficient" in defaults:
        values["trainer.center_rewards_coefficient"] = None
    return values


def finish_trl(conversion: Conversion) -> None:
    """Set the data sets, the values that depend on several keys, and the defaults of TRL."""
    _put_datasets(conversion)
    finish_arguments(conversion)


def finish_arguments(conversion: Conversion) -> None:
    """Set the values that depend on several arguments, and the defaults of TRL."""
    source, values = conversion.source, conversion.values
    put_batch(conversion, "per_device_train_batch_size", 8)
    put_adam(conversion)
    put_warmup(conversion)
    put_cadence(conversion)
    if not conversion.read_flag("use_peft"):
        remove_adapters(conversion)
    accumulation = conversion.read_count("gradient_accumulation_steps", 1)
    if "steps_per_generation" in source:
        steps = conversion.read_number("steps_per_generation", 1) / accumulation
        if steps >= 1 and steps == int(steps):
            conversion.put("trainer.steps_per_generation", int(steps), "steps_per_generation")
    if "generation_batch_size" in source:
        total = values["trainer.total_batch_size"]
        steps = conversion.read_number("generation_batch_size", 1) / float(str(total))
        if steps >= 1 and steps == int(steps):
            conversion.put("trainer.steps_per_generation", int(steps), "generation_batch_size")
        else:
            conversion.changes["generation_batch_size"] = "a multiple of total_batch_size"
    for path, value in (_DEFAULTS | _list_defaults(conversion.method)).items():
        conversion.put_default(path, value)
    if "trainer.max_training_steps" not in values:
        conversion.put_default("trainer.num_train_epochs", 3)
    if source.get("gradient_checkpointing") is None:
        conversion.put_default("base_config.values.gradient_checkpointing", "nothing_saveable")
