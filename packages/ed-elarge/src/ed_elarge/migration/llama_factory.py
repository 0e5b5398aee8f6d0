"""Files of LLaMA-Factory: a rule for each key, and the defaults that differ from this project's."""

from __future__ import annotations

from collections.abc import Mapping

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
from ed_elarge.migration.shared_rules import (
    ADAPTER_RULES,
    TRAINING_RULES,
    omit_template,
    put_adam,
    put_batch,
    put_cadence,
    put_hold_out,
    put_quantization,
    put_targets,
    put_warmup,
    remove_adapters,
)
from ed_elarge.migration.sources import convert_llama_factory_sources

#: Value of `stage` -> method.
_STAGES = {"sft": "sft", "pt": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
#: Value of `pref_loss` -> method, and its loss.
_LOSSES = {
    "sigmoid": ("dpo", None),
    "hinge": ("dpo", "hinge"),
    "ipo": ("dpo", "ipo"),
    "kto_pair": ("dpo", "bco_pair"),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
#: Templates that are no copies of the chat template of a model.
_OWN_TEMPLATES = ("default", "alpaca", "vicuna", "empty", "fewshot")


def find_stage(source: Mapping[str, object]) -> tuple[str, str | None]:
    """Return the method of a file, and its loss."""
    method = _STAGES.get(str(source.get("stage") or "sft"), "sft")
    if method == "dpo":
        return _LOSSES.get(str(source.get("pref_loss") or "sigmoid"), ("dpo", None))
    return method, None


def _put_stage(conversion: Conversion, key: str, value: object) -> None:
    _, loss = find_stage(conversion.source)
    if key == "stage" and value not in _STAGES:
        conversion.changes[key] = f"{value} has no counterpart: see docs/methods.md"
    if key == "pref_loss" and value not in _LOSSES:
        conversion.changes[key] = f"{value} has no counterpart: see trainer.loss_type of dpo"
    if loss is not None:
        conversion.put("trainer.loss_type", loss, f"pref_loss {conversion.source['pref_loss']}")


def _put_template(conversion: Conversion, key: str, value: object) -> None:
    if value in _OWN_TEMPLATES and conversion.source.get("stage") != "pt":
        conversion.changes[key] = f"{value}: set model.tokenizer.chat_template to a Jinja template"
    else:
        omit_template(conversion, key, value)


def _put_kind(conversion: Conversion, key: str, value: object) -> None:
    if value not in ("lora", "full"):
        conversion.changes[key] = f"{value}: trainer.trainable_rules select parameters to train"


def _put_data(conversion: Conversion, key: str, value: object) -> None:
    path = "mixture.eval_informs" if key == "eval_dataset" else "mixture.informs"
    conversion.put(path, convert_llama_factory_sources(conversion, key, value), key)


def _put_adapter(conversion: Conversion, key: str, value: object) -> None:
    if "," in str(value):
        conversion.changes[key] = "several adapters: merge all but the last with `elarge merge`"
    else:
        conversion.put("lora.name_or_path", value, key)


def _put_pissa(conversion: Conversion, key: str, value: object) -> None:
    if is_true(value):
        iterations = parse_yaml_number(conversion.source.get("pissa_iter", 16))
        start = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        conversion.put("lora.init_lora_weights", start, key)
    else:
        conversion.omitted[key] = f"{value!r} changes nothing"


def _put_mix(conversion: Conversion, key: str, value: object) -> None:
    stops = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}
    if value in stops:
        conversion.put("mixture.stop_strategy", stops[str(value)], key)
    elif value != "concat":
        conversion.changes[key] = f"{value} has no counterpart: see mixture.stop_strategy"


def _put_beta(conversion: Conversion, key: str, value: object) -> None:
    conversion.put("trainer.beta", parse_yaml_number(value), key)


def _put_swanlab(conversion: Conversion, key: str, value: object) -> None:
    if value:
        conversion.omitted[key] = "trainer.report_to selects wandb, trackio or mlflow"


#: Key of a file of LLaMA-Factory -> its rule.


def _put_dft(conversion: Conversion, key: str, value: object) -> None:
    if is_true(value):
        conversion.put("trainer.loss_type", "dft", key)


LLAMA_FACTORY_RULES: dict[str, KeyRule] = {
    **TRAINING_RULES,
    **ADAPTER_RULES,
    "model_name_or_path": copy_to("model.name_or_path"),
    "model_revision": read_later("model.extra_kwargs.revision"),
    "adapter_name_or_path": KeyRule("lora.name_or_path", _put_adapter),
    "stage": KeyRule("trainer.trainer_type", _put_stage),
    "pref_loss": KeyRule("trainer.trainer_type (orpo, simpo), or trainer.loss_type", _put_stage),
    "pref_beta": KeyRule("trainer.beta", _put_beta),
    "pref_ftx": lose("no counterpart", 0, 0.0),
    "pref_bco_weight": lose("no counterpart", 0, 0.0),
    "simpo_gamma": copy_to("trainer.simpo_gamma"),
    "dpo_label_smoothing": copy_to("trainer.label_smoothing"),
    "kto_chosen_weight": copy_to("trainer.desirable_weight"),
    "kto_rejected_weight": copy_to("trainer.undesirable_weight"),
    "ld_alpha": copy_to("trainer.ld_alpha"),
    "ref_model": copy_to("reference_model.name_or_path"),
    "reward_model": copy_to("reward_model.name_or_path"),
    "reward_model_type": read_later("reward_model: the folder of a whole model"),
    "ppo_epochs": copy_to("trainer.num_iterations"),
    "ppo_buffer_size": copy_to("trainer.steps_per_generation"),
    "ppo_whiten_rewards": copy_to("trainer.whiten_rewards"),
    "ppo_score_norm": lose("no counterpart"),
    "ppo_target": omit("the weight trainer.beta of the divergence is constant"),
    "finetuning_type": KeyRule("lora: {...}, or no such section for full", _put_kind),
    "lora_target": KeyRule("lora.targets", put_targets),
    "additional_target": copy_to("lora.modules_to_save"),
    "loraplus_lr_ratio": lose("trainer.learning_rate_rules: [[lora_b, RATIO]]", 1, 1.0),
    "create_new_adapter": lose("merge the old adapter with `elarge merge` first"),
    "pissa_init": KeyRule("lora.init_lora_weights: pissa_niter_16", _put_pissa),
    "pissa_iter": read_later("lora.init_lora_weights: pissa_niter_N"),
    "pissa_convert": omit("a saved adapter always fits the unchanged base"),
    "quantization_bit": KeyRule("quantization.model.quantization_method", put_quantization),
    "quantization_method": lose("quantization.model.quantization_method", "bnb", "bitsandbytes"),
    "quantization_type": lose("quantization.model.quantization_method", "nf4"),
    "double_quantization": read_later("quantization.model.double_quantization"),
    "freeze_trainable_layers": lose("trainer.trainable_rules: [[PATTERN, true]]"),
    "freeze_trainable_modules": lose("trainer.trainable_rules: [[PATTERN, true]]"),
    "freeze_vision_tower": lose("trainer.frozen_parameters: vision", True),
    "freeze_multi_modal_projector": lose("trainer.frozen_parameters: projector", True),
    "dataset": KeyRule("mixture.informs, from dataset_info.json", _put_data),
    "eval_dataset": KeyRule("mixture.eval_informs, from dataset_info.json", _put_data),
    "dataset_dir": read_later("mixture.informs: the paths of data_files"),
    "media_dir": omit("paths in rows are relative to the file of the rows"),
    "template": KeyRule("model.tokenizer.chat_template; default: the model's", _put_template),
    "cutoff_len": copy_to("trainer.max_length"),
    "max_samples": read_later("mixture.informs: [{num_rows: ...}]"),
    "packing": read_later("mixture.pack_tokens"),
    "neat_packing": read_later("mixture.pack_tokens, which never mixes documents"),
    "train_on_prompt": lose("rows with a prompt and a completion have no loss on the prompt"),
    "mask_history": lose("the loss covers every answer of a chat"),
    "default_system": lose("write the system message into the rows or the template"),
    "tool_format": omit("tools have the format of the chat template"),
    "enable_thinking": lose("the field chat_template_kwargs of a row", True),
    "streaming": copy_to("mixture.streaming"),
    "buffer_size": copy_to("mixture.shuffle_buffer_size"),
    "mix_strategy": KeyRule("mixture.stop_strategy", _put_mix),
    "interleave_probs": read_later("mixture.mixture_weights"),
    "val_size": KeyRule("mixture.eval_fraction", put_hold_out),
    "disable_shuffling": lose("mixture.shuffle_buffer_size: 1"),
    "pure_bf16": KeyRule("loader.param_dtype: bfloat16", copy_to("pure_bf16").convert),
    "use_dft_loss": KeyRule("trainer.loss_type: dft", _put_dft),
    "use_muon": lose("trainer.optimizer: muon"),
    "use_galore": lose("no counterpart: trainer.optimizer: adamw_8bit saves memory"),
    "use_apollo": lose("no counterpart: trainer.optimizer: adamw_8bit saves memory"),
    "use_badam": lose("no counterpart: trainer.trainable_rules select parameters"),
    "use_adam_mini": lose("no counterpart: trainer.optimizer: adamw_8bit saves memory"),
    "early_stopping_steps": lose("trainer.save_best_k keeps the best checkpoint"),
    "resize_vocab": copy_to("model.resize_token_embeddings"),
    "add_tokens": lose("model.tokenizer: a folder with a tokenizer that has these tokens"),
    "rope_scaling": lose("base_config.values.rope_scaling"),
    "use_llama_pro": lose("trainer.trainable_rules select parameters"),
    "fp8": lose("no counterpart: loader.dtype is bfloat16 or float32"),
    "shift_attn": lose("no counterpart"),
    "moe_aux_loss_coef": copy_to("base_config.values.router_aux_loss_coef"),
    "use_swanlab": KeyRule("omit it: trainer.report_to selects a tracker", _put_swanlab),
    "upcast_layernorm": omit("norms compute in float32"),
    "upcast_lmhead_output": omit("losses compute in float32"),
    "add_special_tokens": lose("model.tokenizer: a folder with a tokenizer that has these tokens"),
    "new_special_tokens_config": lose("model.tokenizer: a folder with such a tokenizer"),
    "init_special_tokens": omit("new rows are close to the mean of the old ones"),
    "train_from_scratch": lose("model.config creates a model with new weights"),
    "mixture_of_depths": lose("no counterpart"),
    "use_asft_loss": lose("no counterpart"),
    "use_eaft_loss": lose("no counterpart"),
    "use_kt": lose("no counterpart: elarge plan states the memory of a run"),
    "use_mca": lose("no counterpart: sharding.axis_dims splits the model"),
    "use_hyper_parallel": lose("no counterpart: sharding.axis_dims splits the model"),
    "freeze_language_model": lose("trainer.frozen_parameters: language_model"),
    "freeze_extra_modules": lose("trainer.trainable_rules: [[PATTERN, true]]"),
    "ref_model_adapters": lose("reference_model.name_or_path: a merged model"),
    "reward_model_adapters": lose("reward_model.name_or_path: a merged model"),
    "eval_on_each_dataset": lose("an action eval for each data set"),
    "preserve_thinking": lose("the chat template decides which reasoning stays"),
    "ignore_pad_token_for_loss": lose("padding never has a loss", True),
    "repetition_penalty": lose("the action generate has sampling_params", 1, 1.0),
    "master_addr": omit("`elarge launch` starts several hosts"),
    "master_port": omit("`elarge launch` starts several hosts"),
    "export_dir": omit("trainer.save_directory contains the merged model"),
    "export_quantization_bit": lose("`elarge quantize` after the training"),
    "export_hub_model_id": omit("trainer.push_to_hub after the run"),
    "task": lose("actions: [{eval: {tasks: [...]}}]"),
    "n_shot": lose("actions: [{eval: {num_fewshot: N}}]"),
    **{
        key: lose("edit preprocessor_config.json")
        for key in (
            *("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels"),
            *("image_do_pan_and_scan", "crop_to_patches", "video_fps", "video_maxlen"),
            *("use_audio_in_video", "audio_sampling_rate"),
        )
    },
    **{
        key: omit("it sets an option that is not used here")
        for key in (
            *("oft_rank", "oft_block_size", "oft_target", "module_dropout", "asft_alpha"),
            *("eaft_alpha", "galore_target", "galore_rank", "galore_update_interval"),
            *("galore_scale", "galore_proj_type", "galore_layerwise", "apollo_target"),
            *("apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_proj"),
            *("apollo_proj_type", "apollo_scale_type", "apollo_layerwise", "apollo_scale_front"),
            *("badam_mode", "badam_start_block", "badam_switch_mode", "badam_switch_interval"),
            *("badam_update_ratio", "badam_mask_mode", "badam_verbose", "kt_weight_path"),
            *("kt_expert_checkpoint_path", "kt_use_lora_experts", "kt_lora_expert_num"),
            *("kt_lora_expert_intermediate_size", "hyper_parallel_args", "fp8_backend"),
            *("fp8_enable_fsdp_float8_all_gather", "export_quantization_dataset"),
            *("export_quantization_nsamples", "export_quantization_maxlen"),
        )
    },
    **{
        key: omit("the best attention and the compiled kernels are always used")
        for key in ("flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc")
    },
    **{
        key: omit("no effect on the result")
        for key in (
            *("infer_dtype", "ms_hub_token", "do_sample", "num_beams", "length_penalty"),
            *("swanlab_run_name", "swanlab_workspace", "compute_dtype", "swanlab_api_key"),
            *("swanlab_logdir", "swanlab_lark_webhook_url", "swanlab_lark_secret", "device_map"),
            *("adapter_folder", "offload_folder", "use_v1_kernels", "om_hub_token", "max_length"),
            *("quantization_device_map", "export_size", "export_device", "export_legacy_format"),
            *("vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank"),
            *("vllm_config", "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size"),
            *("sglang_config", "sglang_lora_backend", "model_max_length", "block_diag_attn"),
            *("eval_num_beams", "ray_init_kwargs", "enable_torch_profiler", "task_dir", "lang"),
            *("profiler_output_dir", "profiler_wait_steps", "profiler_warmup_steps"),
            *("profiler_active_steps", "profiler_repeat", "profiler_record_shapes"),
            *("profiler_profile_memory", "profiler_with_stack", "profile_modules", "save_dir"),
            *("batch_size", "download_mode"),
            *("skip_special_tokens", "split_special_tokens", "loraplus_lr_embedding"),
            *("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size"),
            *("plot_loss", "cache_dir", "low_cpu_mem_usage", "use_fast_tokenizer", "hf_hub_token"),
            *("use_reentrant_gc", "include_num_input_tokens_seen", "logging_first_step"),
            *("compute_accuracy", "predict_with_generate", "infer_backend", "use_kv_cache"),
            *("ray_run_name", "ray_num_workers", "ray_storage_path", "resources_per_worker"),
            *("placement_strategy", "tokenized_path", "data_shared_file_system", "do_predict"),
            *("include_effective_tokens_per_second", "swanlab_project", "swanlab_mode"),
            "print_param_status",
            *("ref_model_quantization_bit", "reward_model_quantization_bit", "save_safetensors"),
        )
    },
    "disable_gradient_checkpointing": read_later("base_config.values.gradient_checkpointing"),
    "max_new_tokens": copy_to("trainer.max_completion_length"),
    "top_k": copy_to("trainer.top_k"),
    "top_p": copy_to("trainer.top_p"),
    "temperature": copy_to("trainer.temperature"),
}
_DEFAULTS: dict[str, object] = {
    "trainer.learning_rate": 5e-5,
    "trainer.max_length": 2048,
    "trainer.scheduler": "linear",
    "trainer.weight_decay": 0.0,
    "trainer.clip_grad": 1.0,
}


def finish_llama_factory(conversion: Conversion) -> None:
    """Set the values that depend on several keys, and the defaults of LLaMA-Factory."""
    source, values = conversion.source, conversion.values
    put_batch(conversion, "per_device_train_batch_size", 8)
    put_adam(conversion)
    put_warmup(conversion)
    put_cadence(conversion)
    if source.get("finetuning_type", "lora") == "lora":
        conversion.put_default("lora.rank", 8)
        conversion.put_default("lora.alpha", 2 * float(str(values["lora.rank"])))
    else:
        remove_adapters(conversion)
    if values.get("quantization.model.quantization_method") == "nf4":
        nested = source.get("double_quantization") is not False
        conversion.put("quantization.model.double_quantization", nested, "double_quantization")
    packs = conversion.read_flag("packing") or conversion.read_flag("neat_packing")
    if packs or (source.get("stage") == "pt" and source.get("packing") is None):
        conversion.put("mixture.pack_tokens", True, "packing")
    if source.get("stage") == "pt" and packs is False and "mixture.pack_tokens" in values:
        conversion.put("mixture.pack_strategy", "wrapped", "stage pt")
    if values.pop("pure_bf16", False):
        conversion.origins.pop("pure_bf16", None)
        conversion.put("loader.dtype", "bfloat16", "pure_bf16")
        conversion.put("loader.param_dtype", "bfloat16", "pure_bf16")
    revision = source.get("model_revision")
    if revision not in (None, "main"):
        conversion.put("model.extra_kwargs.revision", revision, "model_revision")
    if source.get("reward_model_type") not in (None, "full"):
        conversion.changes["reward_model_type"] = "merge its adapter with `elarge merge` first"
    if source.get("interleave_probs"):
        conversion.changes["interleave_probs"] = "mixture.mixture_weights: {NAME: SHARE}"
    if not conversion.read_flag("disable_gradient_checkpointing"):
        conversion.put_default("base_config.values.gradient_checkpointing", "nothing_saveable")
    for path, value in _DEFAULTS.items():
        conversion.put_default(path, value)
    if "trainer.max_training_steps" not in values:
        conversion.put_default("trainer.num_train_epochs", 3)
    if conversion.method == "sft" and source.get("stage") != "pt":
        conversion.put("mixture.tokenization.assistant_only_loss", True, "train_on_prompt: false")
    held_out = {"mixture.eval_fraction", "mixture.eval_informs"} & values.keys()
    for path in ("trainer.evaluation_steps", "trainer.eval_strategy"):
        if not held_out:
            values.pop(path, None)
