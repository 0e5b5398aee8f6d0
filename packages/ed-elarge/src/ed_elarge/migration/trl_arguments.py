"""The arguments of TRL's configurations and trainers, and their defaults, as in TRL 1.16.

A default is JSON without spaces. The arguments that change the run have a rule in
`ed_elarge.migration.trl_files`; `ed_elarge.trl` reads both tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

#: Arguments of `transformers.TrainingArguments`, with the defaults of TRL.
_TRAINING = (
    "output_dir=null per_device_train_batch_size=8 num_train_epochs=3.0 max_steps=-1 "
    'learning_rate=5e-05 lr_scheduler_type="linear" lr_scheduler_kwargs=null warmup_steps=0 '
    'optim="adamw_torch_fused" optim_args=null weight_decay=0.0 adam_beta1=0.9 '
    "adam_beta2=0.999 adam_epsilon=1e-08 optim_target_modules=null "
    "gradient_accumulation_steps=1 average_tokens_across_devices=true max_grad_norm=1.0 "
    "label_smoothing_factor=0.0 bf16=null fp16=false bf16_full_eval=false "
    "fp16_full_eval=false tf32=null activation_checkpointing=null "
    "activation_checkpointing_kwargs=null gradient_checkpointing=true "
    "gradient_checkpointing_kwargs=null torch_compile=false torch_compile_backend=null "
    "torch_compile_mode=null use_liger_kernel=false liger_kernel_config=null use_cache=false "
    "neftune_noise_alpha=null torch_empty_cache_steps=null auto_find_batch_size=false "
    'logging_strategy="steps" logging_steps=10 logging_first_step=false '
    'log_on_each_node=true logging_nan_inf_filter=true include_num_input_tokens_seen="no" '
    'log_level="passive" log_level_replica="warning" disable_tqdm=null report_to="none" '
    'run_name=null project="huggingface" trackio_space_id=null trackio_bucket_id=null '
    'trackio_static_space_id=null eval_strategy="no" eval_steps=null eval_delay=0 '
    "per_device_eval_batch_size=8 prediction_loss_only=false eval_on_start=false "
    "eval_do_concat_batches=true eval_use_gather_object=false eval_accumulation_steps=null "
    "include_for_metrics=[] batch_eval_metrics=false save_only_model=false "
    'save_strategy="steps" save_steps=500 save_on_each_node=false save_total_limit=null '
    "enable_jit_checkpoint=false push_to_hub=false hub_token=null hub_private_repo=null "
    'hub_model_id=null hub_strategy="every_save" hub_always_push=false hub_revision=null '
    "load_best_model_at_end=false metric_for_best_model=null greater_is_better=null "
    "ignore_data_skip=false restore_callback_states_from_checkpoint=false "
    "full_determinism=false seed=42 data_seed=null use_cpu=false accelerator_config=null "
    "parallelism_config=null dataloader_drop_last=false dataloader_num_workers=0 "
    "dataloader_pin_memory=true dataloader_persistent_workers=false "
    "dataloader_prefetch_factor=null dataloader_multiprocessing_context=null "
    "dataloader_in_order=true remove_unused_columns=true label_names=null "
    'train_sampling_strategy="random" length_column_name="length" '
    "ddp_find_unused_parameters=null ddp_bucket_cap_mb=null ddp_broadcast_buffers=null "
    "ddp_static_graph=null ddp_backend=null ddp_timeout=1800 fsdp=null fsdp_config=null "
    'deepspeed=null debug="" skip_memory_metrics=true do_train=false do_eval=false '
    "do_predict=false resume_from_checkpoint=null local_rank=-1"
)
#: Arguments of every method that samples completions.
_GENERATION = (
    "learning_rate=1e-06 remove_unused_columns=false model_init_kwargs=null "
    "trust_remote_code=false disable_dropout=false max_completion_length=512 "
    'ds3_gather_for_generation=true shuffle_dataset=true pad_to_multiple_of="auto" '
    "temperature=1.0 top_p=1.0 top_k=0 min_p=null generation_kwargs=null "
    "chat_template_kwargs=null repetition_penalty=1.0 cache_implementation=null "
    'use_vllm=false vllm_mode="colocate" vllm_model_impl="vllm" vllm_enable_sleep_mode=false '
    'vllm_structured_outputs_regex=null vllm_server_base_url=null vllm_server_host="0.0.0.0" '
    "vllm_server_port=8000 vllm_server_timeout=240.0 vllm_group_port=51216 "
    "vllm_gpu_memory_utilization=0.3 vllm_max_model_length=null vllm_tensor_parallel_size=1 "
    "log_completions=false num_completions_to_print=null log_unique_prompts=false"
)
#: Name of an earlier version -> its present name.
OLDER_NAMES: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "num_train_steps": "max_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
#: Arguments of earlier versions without a new name.
OLDER_ARGUMENTS = (
    *("warmup_ratio", "logging_dir", "overwrite_output_dir", "group_by_length"),
    *("save_safetensors", "max_prompt_length", "torchdistx_path", "fsdp_version"),
)
_PEFT_TEXT = (
    "task_type=null peft_type=null auto_mapping=null peft_version=null "
    "base_model_name_or_path=null revision=null inference_mode=false r=8 target_modules=null "
    'exclude_modules=null lora_alpha=8 lora_dropout=0.0 fan_in_fan_out=false bias="none" '
    "use_rslora=false modules_to_save=null init_lora_weights=true layers_to_transform=null "
    "layers_pattern=null rank_pattern={} alpha_pattern={} megatron_config=null "
    'megatron_core="megatron.core" trainable_token_indices=null loftq_config={} '
    "eva_config=null corda_config=null lora_ga_config=null use_dora=false velora_config=null "
    "alora_invocation_tokens=null use_qalora=false qalora_group_size=16 "
    "monteclora_config=null layer_replication=null runtime_config=null lora_bias=false "
    "target_parameters=null use_bdlora=null arrow_config=null kasa_config=null "
    "ensure_weight_tying=false"
)
#: Arguments of `SFTConfig`.
_SFT = (
    "learning_rate=2e-05 model_init_kwargs=null trust_remote_code=false "
    'router_aux_loss_coef=null chat_template_path=null dataset_text_field="text" '
    "dataset_kwargs=null dataset_num_proc=null eos_token=null max_length=1024 "
    'truncation_mode="keep_start" shuffle_dataset=false packing=false '
    'packing_strategy="bfd" padding_free=false pad_to_multiple_of="auto" '
    "eval_packing=null completion_only_loss=null assistant_only_loss=false "
    'loss_type="nll" activation_offloading=false pad_token=null'
)


@dataclass(frozen=True)
class TrlMethod:
    """A method of TRL: the arguments of its configuration and its trainer.

    Attributes:
        name: begin of the names of both classes: `SFT` of `SFTConfig` and `SFTTrainer`.
        method: the method here.
        settings: arguments and defaults of the configuration.
        trainer: names of the arguments of the trainer, in their order.
    """

    name: str
    method: str
    settings: str
    trainer: str

    @cached_property
    def defaults(self) -> Mapping[str, object]:
        """Argument of the configuration -> its default."""
        return parse_defaults(f"{_TRAINING} {self.settings}")

    @cached_property
    def trainer_arguments(self) -> tuple[str, ...]:
        """Arguments of the trainer, in their order."""
        return tuple(self.trainer.split())


def parse_defaults(text: str) -> dict[str, object]:
    """Return the names and the defaults of `name=default name=default`."""
    pairs = (word.partition("=") for word in text.split())
    return {name: json.loads(value) for name, _, value in pairs}


#: Argument of `peft.LoraConfig` -> its default.
PEFT_DEFAULTS: Mapping[str, object] = parse_defaults(_PEFT_TEXT)
#: Begin of the names of the classes -> the method.
TRL_METHODS: dict[str, TrlMethod] = {
    one.name: one
    for one in (
        TrlMethod(
            "SFT",
            "sft",
            _SFT,
            (
                "model args data_collator train_dataset eval_dataset processing_class "
                "compute_loss_func compute_metrics callbacks optimizers "
                "optimizer_cls_and_kwargs preprocess_logits_for_metrics quantization_config "
                "peft_config formatting_func"
            ),
        ),
        TrlMethod(
            "DPO",
            "dpo",
            (
                "learning_rate=1e-06 model_init_kwargs=null trust_remote_code=false "
                "router_aux_loss_coef=null disable_dropout=true dataset_num_proc=null "
                'max_length=1024 truncation_mode="keep_start" padding_free=false '
                'pad_to_multiple_of="auto" precompute_ref_log_probs=false '
                'precompute_ref_batch_size=null loss_type=["sigmoid"] loss_weights=null '
                'ld_alpha=null f_divergence_type="reverse_kl" f_alpha_divergence_coef=0.5 '
                "label_smoothing=0.0 beta=0.1 use_weighting=false discopop_tau=0.05 "
                "activation_offloading=false sync_ref_model=false ref_model_mixup_alpha=0.6 "
                "ref_model_sync_steps=512 pad_token=null"
            ),
            (
                "model ref_model args data_collator train_dataset eval_dataset "
                "processing_class compute_metrics callbacks optimizers quantization_config "
                "peft_config"
            ),
        ),
        TrlMethod(
            "GRPO",
            "grpo",
            (
                f"{_GENERATION} "
                "router_aux_loss_coef=null cast_lm_head_to_fp32=false num_generations=8 "
                "num_generations_eval=null generation_batch_size=null steps_per_generation=null "
                "beta=0.0 num_iterations=1 epsilon=0.2 delta=null epsilon_high=null "
                "sapo_temperature_neg=1.05 sapo_temperature_pos=1.0 vespo_k_pos=2.0 "
                "vespo_lambda_pos=3.0 vespo_k_neg=3.0 vespo_lambda_neg=2.0 "
                'importance_sampling_level="token" reward_weights=null '
                'multi_objective_aggregation="sum_then_normalize" scale_rewards="group" '
                'loss_type="dapo" mask_truncated_completions=false sync_ref_model=false '
                "ref_model_mixup_alpha=0.6 ref_model_sync_steps=512 top_entropy_quantile=1.0 "
                "entropy_coef=0.0 use_adaptive_entropy=false entropy_coef_min=0.0 "
                "entropy_coef_max=1.0 entropy_coef_delta=0.005 entropy_target=0.2 "
                "max_tool_calling_iterations=null vllm_importance_sampling_correction=true "
                'vllm_importance_sampling_mode="sequence_mask" '
                "vllm_importance_sampling_clip_max=3.0 vllm_importance_sampling_clip_min=null "
                "off_policy_mask_threshold=null "
                "use_bias_correction_kl=true log_multimodal=true log_completions_hub_repo=null "
                "use_transformers_continuous_batching=false "
                "transformers_continuous_batching_config=null use_transformers_paged=false "
                "vllm_importance_sampling_cap=null"
            ),
            (
                "model reward_funcs args train_dataset eval_dataset processing_class "
                "reward_processing_classes callbacks optimizers quantization_config "
                "peft_config tools rollout_func environment_factory"
            ),
        ),
        TrlMethod(
            "RLOO",
            "rloo",
            (
                f"{_GENERATION} "
                "router_aux_loss_coef=null num_generations=2 num_generations_eval=null "
                "generation_batch_size=null steps_per_generation=null beta=0.05 num_iterations=1 "
                "epsilon=0.2 epsilon_high=null reward_weights=null normalize_advantages=false "
                "reward_clip_range=null mask_truncated_completions=false sync_ref_model=false "
                "ref_model_mixup_alpha=0.6 ref_model_sync_steps=512 log_multimodal=true "
                "use_transformers_continuous_batching=false "
                "transformers_continuous_batching_config=null use_transformers_paged=false"
            ),
            (
                "model reward_funcs args train_dataset eval_dataset processing_class "
                "reward_processing_classes callbacks optimizers quantization_config "
                "peft_config"
            ),
        ),
        TrlMethod(
            "Reward",
            "reward",
            (
                "learning_rate=0.0001 model_init_kwargs=null trust_remote_code=false "
                "chat_template_path=null disable_dropout=true dataset_num_proc=null eos_token=null "
                'max_length=1024 pad_to_multiple_of="auto" center_rewards_coefficient=null '
                "activation_offloading=false pad_token=null"
            ),
            (
                "model args data_collator train_dataset eval_dataset processing_class "
                "compute_metrics callbacks optimizers optimizer_cls_and_kwargs "
                "preprocess_logits_for_metrics quantization_config peft_config"
            ),
        ),
        TrlMethod(
            "KTO",
            "kto",
            (
                'learning_rate=1e-06 train_sampling_strategy="sequential" model_init_kwargs=null '
                "trust_remote_code=false router_aux_loss_coef=null disable_dropout=true "
                'dataset_num_proc=null max_length=1024 pad_to_multiple_of="auto" '
                'precompute_ref_log_probs=false precompute_ref_batch_size=null loss_type="kto" '
                "beta=0.1 desirable_weight=1.0 undesirable_weight=1.0 activation_offloading=false "
                "sync_ref_model=false ref_model_mixup_alpha=0.6 ref_model_sync_steps=512"
            ),
            (
                "model ref_model args data_collator train_dataset eval_dataset "
                "processing_class compute_metrics callbacks optimizers quantization_config "
                "peft_config"
            ),
        ),
        TrlMethod(
            "Distillation",
            "distillation",
            (
                f"{_GENERATION} "
                "teacher_model_name_or_path=null teacher_model_revision=null "
                "teacher_model_init_kwargs=null beta=1.0 max_tool_calling_iterations=null"
            ),
            (
                "model teacher_model args train_dataset eval_dataset processing_class "
                "callbacks optimizers quantization_config peft_config tools"
            ),
        ),
        TrlMethod(
            "ORPO",
            "orpo",
            (
                "learning_rate=1e-06 max_length=1024 max_completion_length=null beta=0.1 "
                "disable_dropout=true padding_value=null generate_during_eval=false "
                "is_encoder_decoder=null model_init_kwargs=null trust_remote_code=false "
                "dataset_num_proc=null"
            ),
            (
                "model args data_collator train_dataset eval_dataset processing_class "
                "model_init callbacks optimizers preprocess_logits_for_metrics peft_config "
                "compute_metrics"
            ),
        ),
        TrlMethod(
            "CPO",
            "cpo",
            (
                "learning_rate=1e-06 max_length=1024 max_completion_length=null beta=0.1 "
                'label_smoothing=0.0 loss_type="sigmoid" disable_dropout=true cpo_alpha=1.0 '
                "simpo_gamma=0.5 alpha=0.0 generate_during_eval=false is_encoder_decoder=null "
                "model_init_kwargs=null trust_remote_code=false dataset_num_proc=null"
            ),
            (
                "model args data_collator train_dataset eval_dataset processing_class "
                "model_init callbacks optimizers preprocess_logits_for_metrics peft_config "
                "compute_metrics"
            ),
        ),
        TrlMethod(
            "GKD",
            "gkd",
            (
                f"{_SFT} "
                "temperature=0.9 lmbda=0.5 beta=0.5 max_new_tokens=128 "
                "teacher_model_name_or_path=null teacher_model_init_kwargs=null "
                "disable_dropout=true seq_kd=false"
            ),
            (
                "model teacher_model args data_collator train_dataset eval_dataset "
                "processing_class compute_metrics callbacks optimizers "
                "preprocess_logits_for_metrics peft_config formatting_func"
            ),
        ),
    )
}
