"""The names that other trainers use: Hugging Face `TrainingArguments`, TRL, Axolotl and EasyDeL.

A name with the same meaning is an alias (`SAME`). Every other name is an error that states the
equivalent (`EQUIVALENT`). The pages of docs/migrate list these names, one page for each program.
"""

from __future__ import annotations

#: Name elsewhere -> the option with the same meaning.
SAME: dict[str, str] = {
    "output_dir": "save_directory",
    "max_steps": "max_training_steps",
    "logging_steps": "log_steps",
    "eval_steps": "evaluation_steps",
    "evaluation_strategy": "eval_strategy",
    "logging_strategy": "log_strategy",
    "lr_scheduler_type": "scheduler",
    "lr_scheduler": "scheduler",
    "max_grad_norm": "clip_grad",
    "num_epochs": "num_train_epochs",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "merge_lora_before_save": "merge_adapters",
}

_DTYPE = "the section loader: {dtype: bf16}"
_MESH = "the section sharding: {axis_dims: [dp, fsdp, ep, tp, sp]}"
_ENGINE = "the section esurge, which configures the engine that samples completions"
_WORKERS = "mixture.prefetch_workers and mixture.prefetch_buffer_size"
_CHECKPOINTING = "base_config: {values: {gradient_checkpointing: nothing_saveable}}"
_ADAM = "optimizer_kwargs: {b1: 0.9, b2: 0.95, eps: 1.0e-8}"
_HUB = "`hf upload ORG/NAME <save_directory>/model` after training"
_TOKENIZER = (
    "model: {tokenizer: FOLDER, resize_token_embeddings: true}, with a tokenizer that has "
    "these tokens"
)
_ACTIONS = "the list of actions, such as [train, eval]"
_COMPILED = "omit it: every step is one compiled program"
_ONE_PROCESS = "omit it: one process for each host runs all of its devices"
_TORCH = "omit it: a setting of torch and its libraries"
_NONE = "omit it: this project has no counterpart"
_COMPLETIONS = "num_completions_to_log: completions.jsonl has completions with their rewards"
_SHARED = "omit it: all hosts write to one save_directory"
_SUMS = "omit it: an evaluation sums losses and metrics batch by batch"
_WEIGHTS = "omit it: the engine reads the weights of the trainer on its mesh"

#: Name in `transformers.TrainingArguments` -> what to use instead, or "omit it: " and the reason.
HUGGING_FACE: dict[str, str] = {
    "per_device_train_batch_size": "total_batch_size: sequences of an optimizer step, over all "
    "devices and microbatches",
    "per_device_eval_batch_size": "eval_batch_size: sequences over all devices",
    "auto_find_batch_size": "total_batch_size, with more gradient_accumulation_steps if memory is "
    "short",
    "optim": "optimizer, such as adamw, adamw_8bit, lion or adafactor",
    "optim_target_modules": "learning_rate_rules and weight_decay_rules, pairs of a pattern and a "
    "number",
    "adam_beta1": _ADAM,
    "adam_beta2": _ADAM,
    "adam_epsilon": _ADAM,
    "logging_first_step": "omit it: the first step always has a row of metrics",
    "logging_dir": "save_directory: TensorBoard files are in its folder tensorboard",
    "disable_tqdm": "progress_bar_type: none",
    "do_train": _ACTIONS,
    "do_eval": _ACTIONS,
    "do_predict": _ACTIONS,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "tf32": "the section loader: {precision: default}",
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    "deepspeed": _MESH,
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "parallelism_config": _MESH,
    "accelerator_config": _MESH,
    "local_rank": _ONE_PROCESS,
    "ddp_backend": _ONE_PROCESS,
    "ddp_find_unused_parameters": _ONE_PROCESS,
    "torch_compile": _COMPILED,
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "use_liger_kernel": _COMPILED,
    "liger_kernel_config": _COMPILED,
    "use_cpu": "the section platform: {backend: cpu}",
    "dataloader_num_workers": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataloader_drop_last": "omit it: a run file counts steps, and every step has "
    "total_batch_size sequences",
    "data_seed": "mixture.seed",
    "group_by_length": "mixture: {pack_tokens: true}, which leaves no padding",
    "train_sampling_strategy": "mixture: {pack_tokens: true}, which leaves no padding",
    "remove_unused_columns": "omit it: only the named fields of a row are read",
    "resume_from_checkpoint": "resume_if_possible: true, which continues from the newest "
    "checkpoint in save_directory",
    "overwrite_output_dir": "resume_if_possible: false, which moves existing files aside",
    "ignore_data_skip": "omit it: a resumed run continues with the next row",
    "save_only_model": "save_total_limit: 1; the trained model without optimizer is in "
    "<save_directory>/model",
    "save_safetensors": "omit it: models are always saved as safetensors",
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "average_tokens_across_devices": "omit it: a loss is the mean over the tokens of all devices",
    "batch_eval_metrics": _SUMS,
    "eval_accumulation_steps": _SUMS,
    "eval_do_concat_batches": _SUMS,
    "eval_use_gather_object": _SUMS,
    "include_for_metrics": _SUMS,
    "prediction_loss_only": _SUMS,
    "eval_delay": _NONE,
    "dataloader_in_order": "omit it: the order of batches depends on the seed only",
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_persistent_workers": _WORKERS,
    "dataloader_pin_memory": _TORCH,
    "ddp_broadcast_buffers": _ONE_PROCESS,
    "ddp_bucket_cap_mb": _ONE_PROCESS,
    "ddp_static_graph": _ONE_PROCESS,
    "ddp_timeout": _ONE_PROCESS,
    "debug": _TORCH,
    "enable_jit_checkpoint": "omit it: SIGTERM always saves a checkpoint",
    "full_determinism": "seed, which determines the batches and all random numbers",
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "include_num_input_tokens_seen": "omit it: the metrics contain the number of tokens",
    "length_column_name": "mixture: {pack_tokens: true}, which leaves no padding",
    "log_level": "progress_bar_type: none, which prints no progress",
    "log_level_replica": "omit it: only the first process prints",
    "log_on_each_node": _SHARED,
    "save_on_each_node": _SHARED,
    "logging_nan_inf_filter": "skip_bad_steps",
    "restore_callback_states_from_checkpoint": _TORCH,
    "skip_memory_metrics": "omit it: the metrics always have peak_memory_gib",
    "torch_empty_cache_steps": _TORCH,
    "trackio_bucket_id": _NONE,
    "trackio_space_id": "tracker_entity",
    "trackio_static_space_id": _NONE,
    "use_cache": "omit it: training uses no key-value cache",
    "optim_args": "optimizer_kwargs, a mapping",
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_kwargs": _CHECKPOINTING,
}
#: Name in the configurations of TRL, in addition to `HUGGING_FACE`.
TRL: dict[str, str] = {
    "packing": "mixture.pack_tokens",
    "assistant_only_loss": "mixture.tokenization.assistant_only_loss",
    "dataset_text_field": "content_field of each entry of mixture.informs",
    "truncation_mode": "omit it: texts keep their first tokens, and prompts their last tokens",
    "packing_strategy": "mixture.pack_strategy",
    "padding_free": "mixture: {pack_tokens: true}, which leaves no padding",
    "eval_packing": "mixture.pack_tokens, which also packs held-out texts",
    "pad_to_multiple_of": "max_length: all rows have this length",
    "completion_only_loss": "rows with a prompt and a completion: only the completion is learned",
    "chat_template_path": "model.tokenizer: a folder with the chat template",
    "eos_token": _TOKENIZER,
    "pad_token": _TOKENIZER,
    "dataset_num_proc": "mixture.tokenization: {num_proc: 4}",
    "dataset_kwargs": "the keys of the section mixture",
    "shuffle_dataset": "mixture.shuffle_buffer_size",
    "model_init_kwargs": "the sections model and loader",
    "trust_remote_code": "loader.trust_remote_code",
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_gpu_memory_utilization": "esurge.hbm_utilization",
    "vllm_max_model_length": "esurge.max_model_len",
    "vllm_tensor_parallel_size": _MESH,
    "use_transformers_paged": _ENGINE,
    "generation_batch_size": "total_batch_size and num_generations",
    "num_generations_eval": "num_generations",
    "peft_config": "the section lora: {rank: 16, alpha: 32}",
    "load_in_4bit": "quantization: {model: {quantization_method: nf4}}",
    "load_in_8bit": "quantization: {model: {quantization_method: 8bit}}",
    "precompute_ref_batch_size": "eval_batch_size",
    "router_aux_loss_coef": "base_config: {values: {output_router_logits: true, "
    "router_aux_loss_coef: 0.001}}",
    "cache_implementation": _ENGINE,
    "use_transformers_continuous_batching": _ENGINE,
    "transformers_continuous_batching_config": _ENGINE,
    "cast_lm_head_to_fp32": "omit it: losses compute log-probabilities in float32",
    "chat_template_kwargs": "the field chat_template_kwargs of a row",
    "ds3_gather_for_generation": _WEIGHTS,
    "vllm_enable_sleep_mode": _WEIGHTS,
    "vllm_group_port": _WEIGHTS,
    "vllm_server_base_url": _WEIGHTS,
    "vllm_server_host": _WEIGHTS,
    "vllm_server_port": _WEIGHTS,
    "vllm_server_timeout": _WEIGHTS,
    "vllm_model_impl": _ENGINE,
    "vllm_structured_outputs_regex": _NONE,
    "vllm_importance_sampling_correction": "importance_sampling_correction",
    "vllm_importance_sampling_mode": "importance_sampling_correction",
    "vllm_importance_sampling_cap": "importance_sampling_cap",
    "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    "vllm_importance_sampling_clip_min": "importance_sampling_cap",
    "generation_kwargs": "temperature, top_p, top_k and min_p",
    "repetition_penalty": "omit it: completions are samples of the model's distribution",
    "log_completions": _COMPLETIONS,
    "log_completions_hub_repo": _COMPLETIONS,
    "log_multimodal": _COMPLETIONS,
    "log_unique_prompts": _COMPLETIONS,
    "max_tool_calling_iterations": "max_turns, with tools: one more, for the message without calls",
    "multi_objective_aggregation": "reward_weights",
    "teacher_model_name_or_path": "the section teacher_model: {name_or_path: ...}",
    "teacher_model_revision": "the section teacher_model: {revision: ...}",
    "teacher_model_init_kwargs": "the section teacher_model",
    "activation_offloading": "base_config: {values: {gradient_checkpointing: ...}} with a policy "
    "that offloads",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
}
#: Name in a configuration of Axolotl, in addition to `HUGGING_FACE` and `TRL`.
AXOLOTL: dict[str, str] = {
    "micro_batch_size": "total_batch_size and gradient_accumulation_steps: a microbatch has "
    "total_batch_size / gradient_accumulation_steps sequences over all devices",
    "batch_size": "total_batch_size: sequences of an optimizer step, over all devices and "
    "microbatches",
    "sample_packing": "mixture: {pack_tokens: true, pack_seq_length: ...}",
    "pad_to_sequence_len": "mixture.tokenization: {padding: max_length}",
    "val_set_size": "mixture.eval_fraction",
    "cosine_min_lr_ratio": "learning_rate_end",
    "flash_attention": "base_config: {values: {attn_mechanism: flash_attn2}}",
    "early_stopping_patience": "save_best_k and load_best_model_at_end",
    "wandb_project": "project and report_to: wandb",
    "wandb_name": "run_name and report_to: wandb",
    "wandb_run_id": "run_name and report_to: wandb",
    "lora_target_linear": "lora.targets",
    "special_tokens": _TOKENIZER,
    "train_on_inputs": "rows with a prompt and a completion: only the completion is learned",
}
#: Every name of another program that is no option.
EQUIVALENT: dict[str, str] = {**HUGGING_FACE, **TRL, **AXOLOTL}
