"""Files of Axolotl: a rule for each key, and the defaults that differ from this project's."""

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
    translate_to,
)
from ed_elarge.migration.shared_rules import (
    ADAPTER_RULES,
    OPTIMIZER_NAMES,
    PEFT_RULES,
    SCHEDULER_NAMES,
    TRAINING_RULES,
    omit_template,
    put_adam,
    put_batch,
    put_cadence,
    put_hold_out,
    put_project,
    put_rewards,
    put_warmup,
    remove_adapters,
)
from ed_elarge.migration.sources import convert_axolotl_sources

#: Value of `rl` -> the method, and its loss.
_METHODS = {
    "dpo": ("dpo", None),
    "ipo": ("dpo", "ipo"),
    "kto": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
    "grpo": ("grpo", None),
}
_NO_COUNTERPART = "no counterpart"
_KERNELS = "every step is one compiled program"
_ATTENTION = "the best attention is selected by base_config.values.attn_mechanism: auto"
_TOKENS = "model.tokenizer: a folder with a tokenizer that has these tokens"
_SOURCES = "mixture: {informs: [{data_files: ..., content_field: ...}]}"
_TEMPLATE = "model.tokenizer: {chat_template: chatml}; without it, the template of the model"
_ADAPTER = "lora: {...}; for qlora also quantization: {model: {quantization_method: nf4}}"
_CLASSES = "config.json of the model states its classes"


def find_method(source: Mapping[str, object]) -> tuple[str, str | None]:
    """Return the method of a file, and its loss."""
    if is_true(source.get("reward_model")):
        return "reward", None
    if is_true(source.get("process_reward_model")):
        return "prm", None
    return _METHODS.get(str(source.get("rl") or "").lower(), ("sft", None))


def _put_method(conversion: Conversion, key: str, value: object) -> None:
    method, loss = find_method(conversion.source)
    if key == "rl" and str(value).lower() not in _METHODS:
        conversion.changes[key] = f"{value} has no counterpart: see docs/methods.md"
    if loss is not None:
        conversion.put("trainer.loss_type", loss, f"{key} {value}")
    conversion.method = method


def _put_sources(conversion: Conversion, key: str, value: object) -> None:
    path = "mixture.eval_informs" if key == "test_datasets" else "mixture.informs"
    conversion.put(path, convert_axolotl_sources(conversion, key, value), key)
    if key == "pretraining_dataset":
        conversion.put("mixture.streaming", True, key)


def _put_template(conversion: Conversion, key: str, value: object) -> None:
    name = str(value)
    if name == "chatml":
        conversion.put("model.tokenizer.chat_template", "chatml", key)
    elif name == "alpaca":
        conversion.changes[key] = f"{name}: set model.tokenizer.chat_template to a Jinja template"
    elif name.startswith("tokenizer_default_fallback") or name not in ("jinja",):
        omit_template(conversion, key, value)


def _put_adapter(conversion: Conversion, key: str, value: object) -> None:
    if value in ("lora", "qlora"):
        conversion.put("lora.rank", 8, "default of Axolotl")
    elif value:
        conversion.changes[key] = f"{value}: the section lora has adapters of low rank"


def _put_attention(conversion: Conversion, key: str, value: object) -> None:
    conversion.omitted[key] = _ATTENTION


def _put_wandb(conversion: Conversion, key: str, value: object) -> None:
    if value and conversion.source.get("wandb_project"):
        conversion.put("trainer.run_name", str(value), key)


def _put_entity(conversion: Conversion, key: str, value: object) -> None:
    if value and conversion.source.get("wandb_project"):
        conversion.put("trainer.tracker_entity", str(value), key)


def _put_mesh_axis(conversion: Conversion, key: str, value: object) -> None:
    places = {"dp_replicate_size": 0, "expert_parallel_size": 2, "tensor_parallel_size": 3}
    size = conversion.read_count(key, 1)
    axes = conversion.values.get("sharding.axis_dims", [1, -1, 1, 1, 1])
    if size > 1 and isinstance(axes, list):
        axes = list(axes)
        axes[places.get(key, 4)] = size
        conversion.put("sharding.axis_dims", axes, key)


def _put_nested(conversion: Conversion, key: str, value: object) -> None:
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if item is None:
            continue
        rule = _NESTED_RULES[key].get(str(name))
        if rule is None:
            conversion.changes[f"{key}.{name}"] = "unknown here"
        else:
            rule.convert(conversion, f"{key}.{name}", item)


def _put_beta(conversion: Conversion, key: str, value: object) -> None:
    if find_method(conversion.source)[0] in ("dpo", "kto", "orpo", "simpo", "grpo"):
        conversion.put("trainer.beta", parse_yaml_number(value), key)


_AXIS = KeyRule("sharding.axis_dims: [dp, fsdp, ep, tp, sp]", _put_mesh_axis)
#: Key of the mapping `trl` -> its rule.
REINFORCEMENT_RULES: dict[str, KeyRule] = {
    "beta": copy_to("trainer.beta"),
    "max_completion_length": copy_to("trainer.max_completion_length"),
    "num_generations": copy_to("trainer.num_return_sequences"),
    "num_iterations": copy_to("trainer.num_iterations"),
    "reward_weights": copy_to("trainer.reward_weights"),
    "reward_funcs": KeyRule("trainer.reward_functions", put_rewards),
    "temperature": copy_to("trainer.temperature"),
    "top_p": copy_to("trainer.top_p"),
    "top_k": copy_to("trainer.top_k"),
    "min_p": copy_to("trainer.min_p"),
    "loss_type": copy_to("trainer.loss_type"),
    "epsilon": copy_to("trainer.epsilon"),
    "epsilon_high": copy_to("trainer.epsilon_high"),
    "scale_rewards": copy_to("trainer.scale_rewards"),
    "importance_sampling_level": copy_to("trainer.importance_sampling_level"),
    "mask_truncated_completions": copy_to("trainer.mask_truncated_completions"),
    "sync_ref_model": copy_to("trainer.sync_ref_model"),
    "ref_model_mixup_alpha": copy_to("trainer.ref_model_mixup_alpha"),
    "ref_model_sync_steps": copy_to("trainer.ref_model_sync_steps"),
    "repetition_penalty": lose("completions are samples of the model's distribution", 1, 1.0),
    "generation_kwargs": lose("trainer.temperature, top_p, top_k and min_p"),
    "chat_template_kwargs": lose("the field chat_template_kwargs of a row"),
    **{
        key: omit("the engine of this project samples completions with the trained weights")
        for key in (
            *("use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_lora_sync"),
            *("vllm_server_timeout", "vllm_enable_sleep_mode", "vllm_sync_interval"),
            *("vllm_importance_sampling_correction", "use_liger_loss", "log_completions"),
            *("num_completions_to_print", "use_data_producer", "async_prefetch", "prefetch_depth"),
            *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
            *("reward_num_workers", "generation_batch_size"),
        )
    },
}
#: Key of the mapping `vllm` -> its rule.
ENGINE_RULES: dict[str, KeyRule] = {
    "gpu_memory_utilization": copy_to("esurge.hbm_utilization"),
    "max_model_len": copy_to("esurge.max_model_len"),
    **{
        key: omit("the engine shares the devices of the trainer")
        for key in (
            *("host", "port", "device", "dtype", "tensor_parallel_size", "data_parallel_size"),
            *("enable_prefix_caching", "enforce_eager", "serve_module", "worker_extension_cls"),
            *("enable_reasoning", "reasoning_parser"),
        )
    },
}
#: Key of an Axolotl file -> its rule.
#: Key with a mapping -> the rules of its keys.
_NESTED_RULES = {"trl": REINFORCEMENT_RULES, "vllm": ENGINE_RULES, "peft": PEFT_RULES}
AXOLOTL_RULES: dict[str, KeyRule] = {
    **{key: rule for key, rule in TRAINING_RULES.items() if not key.startswith("per_device")},
    **ADAPTER_RULES,
    "base_model": copy_to("model.name_or_path"),
    "base_model_config": omit(_CLASSES),
    "revision_of_model": copy_to("model.extra_kwargs.revision"),
    "tokenizer_config": copy_to("model.tokenizer.name_or_path"),
    **{key: omit(_CLASSES) for key in ("model_type", "tokenizer_type", "processor_type")},
    "rl": KeyRule("trainer.trainer_type: dpo, kto, orpo, simpo or grpo", _put_method),
    "reward_model": KeyRule("trainer.trainer_type: reward", _put_method),
    "process_reward_model": KeyRule("trainer.trainer_type: prm", _put_method),
    "datasets": KeyRule(
        "mixture: {informs: [{data_files: ..., content_field: ...}]}", _put_sources
    ),
    "test_datasets": KeyRule("mixture.eval_informs", _put_sources),
    "pretraining_dataset": KeyRule("mixture: {informs: [...], streaming: true}", _put_sources),
    "streaming": copy_to("mixture.streaming"),
    "dataset_prepared_path": omit("mixture.cache_dir; the default is shared by all runs"),
    "val_set_size": KeyRule("mixture.eval_fraction", put_hold_out),
    "sequence_len": copy_to("trainer.max_length"),
    "sample_packing": read_later("mixture.pack_tokens"),
    "eval_sample_packing": omit("held-out texts are packed as the others"),
    "pad_to_sequence_len": omit("rows have one length, so that one program computes them"),
    "pad_to_multiple_of": omit("rows have one length, so that one program computes them"),
    "train_on_inputs": read_later("mixture.tokenization: {assistant_only_loss: false}"),
    "shuffle_merged_datasets": lose("mixture.shuffle_buffer_size: 1 keeps the order", True),
    "excess_length_strategy": translate_to(
        "mixture.tokenization.truncation", {"drop": "drop", "truncate": "right"}
    ),
    "max_prompt_len": copy_to("trainer.max_prompt_length"),
    "chat_template": KeyRule(
        "model.tokenizer: {chat_template: chatml}; without it, the template of the model",
        _put_template,
    ),
    "chat_template_jinja": copy_to("model.tokenizer.chat_template"),
    "special_tokens": read_later(_TOKENS),
    "tokens": lose(f"{_TOKENS}, and model.resize_token_embeddings: true"),
    "added_tokens_overrides": lose(_TOKENS),
    "eot_tokens": omit("a chat has the end tokens of its template"),
    "default_system_message": lose("write the system message into the rows or the template"),
    "adapter": KeyRule(
        "lora: {...}; for qlora also quantization: {model: {quantization_method: nf4}}",
        _put_adapter,
    ),
    "lora_model_dir": copy_to("lora.name_or_path"),
    "lora_target_linear": omit("without lora.targets, every linear layer has an adapter"),
    "lora_target_parameters": lose("lora.targets, patterns over the names of layers"),
    "lora_fan_in_fan_out": omit("the layout of the weights is known"),
    "peft_use_dora": copy_to("lora.dora"),
    "peft_use_rslora": copy_to("lora.rslora"),
    "peft_layers_to_transform": lose("lora.targets: [layers.(0|1).*]"),
    "loraplus_lr_ratio": lose("trainer.learning_rate_rules: [[lora_b, RATIO]]", 1, 1.0),
    "relora": lose("no counterpart: train with the section lora, merge, and repeat"),
    "embedding_lr": lose("trainer.learning_rate_rules: [[embed, FACTOR]]"),
    "embedding_lr_scale": lose("trainer.learning_rate_rules: [[embed, FACTOR]]", 1, 1.0),
    "lr_groups": lose("trainer.learning_rate_rules, pairs of a pattern and a factor"),
    "unfrozen_parameters": lose("trainer.trainable_rules: [[PATTERN, true]]"),
    "num_epochs": copy_to("trainer.num_train_epochs"),
    "batch_size": read_later("trainer.total_batch_size"),
    "micro_batch_size": read_later("trainer.total_batch_size, over all devices"),
    "eval_batch_size": read_later("trainer.eval_batch_size, over all devices"),
    "optimizer": translate_to("trainer.optimizer", OPTIMIZER_NAMES),
    "optim_args": lose("trainer.optimizer_kwargs, a mapping"),
    "lr_scheduler": translate_to("trainer.scheduler", SCHEDULER_NAMES),
    "cosine_min_lr_ratio": read_later("trainer.learning_rate_end"),
    "cosine_constant_lr_ratio": lose("trainer.scheduler: wsd keeps the rate before its decay"),
    "lr_quadratic_warmup": lose("the warm-up is linear"),
    "evals_per_epoch": copy_to("trainer.evals_per_epoch"),
    "saves_per_epoch": copy_to("trainer.saves_per_epoch"),
    "early_stopping_patience": lose("trainer.save_best_k keeps the best checkpoint"),
    "rl_beta": KeyRule("trainer.beta", _put_beta),
    "dpo_beta": KeyRule("trainer.beta", _put_beta),
    "orpo_alpha": copy_to("trainer.beta"),
    "simpo_gamma": copy_to("trainer.simpo_gamma"),
    "cpo_alpha": copy_to("trainer.cpo_alpha"),
    "kto_desirable_weight": copy_to("trainer.desirable_weight"),
    "kto_undesirable_weight": copy_to("trainer.undesirable_weight"),
    "dpo_label_smoothing": copy_to("trainer.label_smoothing"),
    "precompute_ref_log_probs": copy_to("trainer.precompute_ref_log_probs"),
    "center_rewards_coefficient": copy_to("trainer.center_rewards_coefficient"),
    "trl": KeyRule("trainer: the keys of its trainer_type", _put_nested),
    "vllm": KeyRule("esurge: {...}", _put_nested),
    "qat": lose("trainer.quantization_mode"),
    "fp8": lose("no counterpart: loader.dtype is bfloat16 or float32"),
    "wandb_project": KeyRule("trainer.project, with report_to: wandb", put_project),
    "wandb_name": KeyRule("trainer.run_name", _put_wandb),
    "wandb_run_id": KeyRule("trainer.run_name", _put_wandb),
    "wandb_entity": KeyRule("trainer.tracker_entity", _put_entity),
    **{
        key: omit("trainer.report_to selects wandb, trackio or mlflow")
        for key in ("wandb_watch", "wandb_log_model", "wandb_mode", "use_wandb", "use_comet")
    },
    **dict.fromkeys(("dp_replicate_size", "tensor_parallel_size", "expert_parallel_size"), _AXIS),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), _AXIS),
    **{
        key: omit("the default mesh shards the model over all devices")
        for key in ("dp_shard_size", "ddp", "device_map", "low_cpu_mem_usage", "world_size")
    },
    **{
        key: KeyRule(f"omit it: {_ATTENTION}", _put_attention)
        for key in (
            *("flash_attention", "sdp_attention", "xformers_attention", "flex_attention"),
            *("eager_attention", "attn_implementation", "sage_attention", "s2_attention"),
        )
    },
    **{
        key: omit(_KERNELS)
        for key in (
            *("liger_rms_norm", "liger_rope", "liger_glu_activation", "use_kernels"),
            *("liger_layer_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
            *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
            *("chunked_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
            *("torch_compile_backend", "deepcompile", "tiled_mlp", "gc_steps"),
        )
    },
    **{
        key: omit("no effect on the result")
        for key in (
            *("dataset_processes", "dataset_num_proc", "dataloader_prefetch_factor"),
            *("dataloader_pin_memory", "local_rank", "save_safetensors", "use_tensorboard"),
            "is_qwen_derived_model",
            *("activation_offloading", "layer_offloading", "skip_prepare_dataset", "debug"),
            *("sample_packing_group_size", "sample_packing_bin_size"),
            *("lora_on_cpu", "include_tkps", "remove_unused_columns"),
            "is_llama_derived_model",
            *("is_mistral_derived_model", "is_falcon_derived_model"),
            *("tokenizer_use_fast", "tokenizer_legacy", "fix_untrained_tokens", "use_ray"),
            *("dataset_keep_in_memory", "save_first_step", "profiler_steps", "use_trackio"),
            *("qlora_sharded_model_loading", "lora_embedding_kernel", "generate_samples"),
            *("comet_project_name", "comet_experiment_key", "mlflow_tracking_uri"),
            *("mlflow_run_name", "tokenizer_save_jinja_files", "include_tokens_per_second"),
            *("multipack_real_batches", "eval_table_size", "eval_max_new_tokens", "ddp_timeout"),
        )
    },
    "resize_token_embeddings_to_32x": omit("model.resize_token_embeddings sets the rows"),
    "mean_resizing_embeddings": omit("new rows are close to the mean of the old ones"),
    "shrink_embeddings": omit("model.resize_token_embeddings removes no rows"),
    "sample_packing_sequentially": omit("mixture.pack_strategy: greedy packs in order"),
    "freeze_mm_modules": lose("trainer.frozen_parameters: vision|projector"),
    "float32": omit("loader.dtype is float32 by default"),
    "dpo_loss_type": read_later("trainer.loss_type"),
    "dpo_loss_weights": copy_to("trainer.loss_weights"),
    "trackio_project_name": omit("trainer.project, with report_to: trackio"),
    "trackio_run_name": omit("trainer.run_name, with report_to: trackio"),
    "gptq": omit("the format of a quantized checkpoint is read from its config.json"),
    "ddp_find_unused_parameters": omit("one process for each host runs all of its devices"),
    "auto_resume_from_checkpoints": omit("a run continues from its newest checkpoint"),
    "hf_use_auth_token": omit("the environment variable HF_TOKEN"),
    "push_dataset_to_hub": omit("mixture.save, and `hf upload` after the run"),
    "loss_watchdog_threshold": omit("trainer.skip_bad_steps skips steps with a spike"),
    "loss_watchdog_patience": omit("trainer.rolling_interval_length ends a run with bad steps"),
    "mlflow_experiment_name": omit("trainer.project, with report_to: mlflow"),
    "use_mlflow": omit("trainer.report_to: mlflow"),
    "strict": omit("an unknown key is always an error"),
    "plugins": omit("entry points register families, kernels and methods"),
    "rope_scaling": copy_to("base_config.values.rope_scaling"),
    "noisy_embedding_alpha": copy_to("trainer.neftune_noise_alpha"),
    "overrides_of_model_config": lose("base_config.values"),
    "overrides_of_model_kwargs": lose("base_config.values"),
    "bnb_config_kwargs": lose("quantization.model"),
    "peft_init_lora_weights": PEFT_RULES["init_lora_weights"],
    "dataset_exact_deduplication": lose("`elarge data` finds equal rows: remove them"),
    "min_sample_len": lose("no counterpart: remove short rows with format_callback"),
    "bfloat16": TRAINING_RULES["bf16"],
    "float16": TRAINING_RULES["fp16"],
    "max_packed_sequence_len": copy_to("mixture.pack_seq_length"),
    "evaluation_strategy": copy_to("trainer.eval_strategy"),
    "chat_template_kwargs": lose("the field chat_template_kwargs of a row"),
    "ebft": lose(_NO_COUNTERPART),
    "trainer_cls": lose(_NO_COUNTERPART),
    "use_pose": lose(_NO_COUNTERPART),
    "use_eaft": lose(_NO_COUNTERPART),
    "curriculum_sampling": lose("no counterpart: the order of rows is random or that of the file"),
    "use_onebitllms": lose(_NO_COUNTERPART),
    "scaling_softmax": lose(_NO_COUNTERPART),
    "reinit_weights": lose("model.config creates a model with new weights"),
    "quantization": lose("`elarge quantize` after the training"),
    "model_quantization_config": lose("quantization.model"),
    "model_quantization_config_kwargs": lose("quantization.model"),
    "quantize_moe_experts": lose("quantization.model"),
    "num_labels": copy_to("trainer.num_labels"),
    "cls_model_config": omit("the model type selects the class"),
    "type_of_model": omit("the model type selects the class"),
    "lora_rank_pattern": lose("no counterpart: adapters of a run have one rank"),
    "lora_alpha_pattern": lose("no counterpart: adapters of a run have one alpha"),
    "peft": KeyRule("the keys of `peft`", _put_nested),
    "peft_layers_pattern": lose("lora.targets, patterns over the names of layers"),
    "peft_layer_replication": lose(_NO_COUNTERPART),
    "peft_trainable_token_indices": lose("lora.modules_to_save: [embed_tokens]"),
    "loraplus_lr_embedding": lose("trainer.learning_rate_rules: [[embed, FACTOR]]"),
    "dpo_use_weighting": copy_to("trainer.use_weighting"),
    "rpo_alpha": lose("trainer.loss_type: [sigmoid, sft], with loss_weights"),
    "dpo_norm_loss": lose(_NO_COUNTERPART),
    "do_bench_eval": lose("actions: [{eval: {tasks: [...]}}]"),
    "do_causal_lm_eval": lose("actions: [{eval: {tasks: [...]}}]"),
    "dataset_shard_num": lose("write the rows of a shard into a file"),
    "dataloader_drop_last": lose(_NO_COUNTERPART),
    "eval_sequence_len": lose("mixture.pack_seq_length applies to held-out rows", None),
    "role_boundaries": lose("a chat template with generation marks"),
    "image_size": lose("edit preprocessor_config.json"),
    "processor_kwargs": lose("edit preprocessor_config.json"),
    "tokenizer_use_mistral_common": lose("the tokenizer of the checkpoint is used"),
    "adam_epsilon2": lose("trainer.optimizer_kwargs"),
    "adam_beta3": lose("trainer.optimizer_kwargs"),
    **{
        key: lose("trainer.optimizer_kwargs")
        for key in ("dion_lr", "dion_momentum", "dion_rank_fraction", "dion_rank_multiple_of")
    },
    **{
        key: lose("no counterpart: trainer.optimizer: adamw_8bit saves memory")
        for key in (
            *("qgalore_rank", "qgalore_update_proj_gap", "qgalore_scale", "qgalore_proj_type"),
            *("qgalore_proj_quant", "qgalore_proj_bits", "qgalore_proj_group_size"),
            *("qgalore_cos_threshold", "qgalore_gamma_proj", "qgalore_queue_size"),
        )
    },
    **{
        key: lose("no counterpart: trainer.scheduler lists the schedules")
        for key in ("jagged_restart_steps", "jagged_restart_warmup_steps", "lr_div_factor")
    },
    "jagged_restart_anneal_steps": lose("no counterpart: trainer.scheduler lists the schedules"),
    **{
        key: lose("trainer.trainable_rules: [[PATTERN, true]]")
        for key in ("lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute")
    },
    **{
        key: omit("it sets an option that is not used here")
        for key in (
            *("pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks"),
            *("scaling_softmax_factor", "scaling_softmax_bias", "eaft_alpha", "eaft_k"),
            *("relora_prune_ratio", "relora_prune_method", "relora_cpu_offload"),
            *("bench_dataset", "bench_split", "eval_causal_lm_metrics", "dataset_shard_idx"),
            *("fp8_config", "fp8_enable_fsdp_float8_all_gather", "image_resize_algorithm"),
        )
    },
    **{
        key: omit(_KERNELS)
        for key in (
            *("dpo_use_liger_kernel", "flash_optimum", "large_head_attention", "flash_attn_d512"),
            *("sdpa_varlen", "fused_attn_kernel", "experts_implementation", "ring_attn_func"),
            *("heads_k_stride", "gemma4_hybrid_attn_impl", "llama4_linearized_experts"),
            *("torch_compile_mode", "torch_compile_options", "flex_attn_compile_kwargs"),
            *("chunked_cross_entropy_num_chunks", "tiled_mlp_num_shards"),
            *("tiled_mlp_use_original_mlp", "selective_checkpointing", "dpo_use_logits_to_keep"),
        )
    },
    **{
        key: omit("no effect on the result")
        for key in (
            *("embeddings_skip_upcast", "dynamic_checkpoint", "num_dataset_shards_to_save"),
            *("shuffle_before_merging_datasets", "device", "ddp_bucket_cap_mb"),
            *("ddp_broadcast_buffers", "torch_empty_cache_steps", "gc_collect_steps"),
            *("sample_packing_mp_start_method", "pretrain_multipack_buffer_size"),
            *("pretrain_multipack_attn", "streaming_multipack_buffer_size"),
            *("fsdp_final_state_dict_type", "profiler_steps_start", "max_memory"),
            *("gpu_memory_limit", "is_preprocess", "preprocess_iterable", "total_num_tokens"),
            *("total_supervised_tokens", "sample_packing_eff_est", "axolotl_config_path"),
            *("num_generation_samples", "generation_max_new_tokens", "generation_temperature"),
            *("generation_top_p", "generation_top_k", "generation_prompt_ratio"),
            *("generation_do_sample", "experimental_skip_move_to_device", "capabilities"),
            *("env_capabilities", "peft_ensure_weight_tying", "peft_autocast_adapter_dtype"),
            *("merge_lora", "merge_method", "hf_mlflow_log_artifacts", "comet_api_key"),
            *("comet_workspace", "comet_mode", "comet_online", "comet_experiment_config"),
            *("use_otel_metrics", "otel_metrics_host", "otel_metrics_port", "gradio_title"),
            *("gradio_share", "gradio_server_name", "gradio_server_port", "ple_cpu_offload"),
            *("gradio_max_new_tokens", "gradio_temperature", "ray_run_name"),
            *("ray_num_workers", "resources_per_worker", "fp32_norms", "fp32_norm_classes"),
            *("dpo_padding_free", "batch_flattening", "dpo_generate_during_eval"),
        )
    },
    "pretraining_sample_concatenation": copy_to("mixture.pack_tokens"),
}
#: Path -> the default of Axolotl.
_DEFAULTS: dict[str, object] = {
    "trainer.max_length": 512,
    "trainer.scheduler": "cosine",
    "trainer.weight_decay": 0.0,
    "trainer.clip_grad": 1.0,
}


def finish_axolotl(conversion: Conversion) -> None:
    """Set the values that depend on several keys, and the defaults of Axolotl."""
    source = conversion.source
    put_batch(conversion, "micro_batch_size", 1)
    if "batch_size" in source and "micro_batch_size" not in source:
        total = conversion.read_count("batch_size", 1)
        conversion.put("trainer.total_batch_size", total, "batch_size")
    put_adam(conversion)
    put_warmup(conversion)
    put_cadence(conversion)
    if conversion.read_flag("sample_packing"):
        conversion.put("mixture.pack_tokens", True, "sample_packing")
    if source.get("adapter") in (None, "", False):
        remove_adapters(conversion)
    elif source.get("adapter") == "qlora" and not conversion.read_flag("load_in_8bit"):
        path = "quantization.model.quantization_method"
        conversion.put(path, "nf4", "adapter qlora")
    ratio = conversion.read_number("cosine_min_lr_ratio", 0.0)
    if ratio:
        rate = conversion.read_number("learning_rate", 0.0)
        conversion.put(
            "trainer.learning_rate_end", float(f"{ratio * rate:.9g}"), "cosine_min_lr_ratio"
        )
    if conversion.read_flag("train_on_inputs"):
        informs = conversion.values.get("mixture.informs")
        rows = informs if isinstance(informs, list) else []
        if any(isinstance(row, dict) and row.get("format") == "alpaca" for row in rows):
            conversion.changes["train_on_inputs"] = (
                "rows with a prompt and a completion have no loss on the prompt"
            )
    losses = source.get("dpo_loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    if losses[0] and conversion.method == "dpo":
        conversion.put("trainer.loss_type", losses if losses[1:] else losses[0], "dpo_loss_type")
    tokens = source.get("special_tokens")
    if isinstance(tokens, Mapping) and any(key != "pad_token" for key in tokens):
        conversion.changes["special_tokens"] = _TOKENS
    elif tokens:
        conversion.omitted["special_tokens"] = "padding has no token of its own in the loss"
    for path, value in _DEFAULTS.items():
        conversion.put_default(path, value)
    if "trainer.max_training_steps" not in conversion.values:
        conversion.put_default("trainer.num_train_epochs", 1)
    if not {"warmup_steps", "warmup_ratio"} & source.keys():
        conversion.put_default("trainer.warmup_ratio", 0.03)
    held_out = {"mixture.eval_fraction", "mixture.eval_informs"} & conversion.values.keys()
    cadences = {"trainer.evaluation_steps", "trainer.eval_strategy", "trainer.evals_per_epoch"}
    if held_out and not cadences & conversion.values.keys():
        conversion.put_default("trainer.eval_strategy", "epoch")
    elif not held_out:
        for path in cadences & conversion.values.keys():
            del conversion.values[path]
    if not {f"trainer.{key}" for key in ("save_steps", "save_strategy", "saves_per_epoch")} & (
        conversion.values.keys()
    ):
        conversion.put_default("trainer.save_strategy", "epoch")
