"""Keys at the top of files of Axolotl and of TRL's command line, and their places in a run file.

`elarge FILE --dry-run` prints the place of each key of such a file. The pages of docs/migrate list
the keys.
"""

from __future__ import annotations

import re

from ed_trainers.arguments import ARGUMENTS
from ed_trainers.options.other_names import EQUIVALENT

_ATTENTION = "base_config: {values: {attn_mechanism: auto}}"
_COMPILED = "omit it: every step is one compiled program"
_CLASSES = "omit it: config.json of the model states its classes"
_MESH = "sharding: {axis_dims: [dp, fsdp, ep, tp, sp]}"
_DTYPE = "loader: {dtype: bf16}"
_LOGITS = "trainer.lmhead_chunksize: losses never create the logits of all tokens"
_RATES = "trainer.learning_rate_rules, pairs of a pattern and a factor"
_NONE = "omit it: this project has no counterpart"

#: Key of an Axolotl file -> its place here, or "omit it: " and the reason.
AXOLOTL_KEYS: dict[str, str] = {
    "base_model": "model: {name_or_path: ...}",
    "revision_of_model": "model: {extra_kwargs: {revision: ...}}",
    "model_type": _CLASSES,
    "tokenizer_type": _CLASSES,
    "processor_type": _CLASSES,
    "tokenizer_config": "model.tokenizer",
    "chat_template": "model: {tokenizer: {chat_template: FILE}}; without it, the model's template",
    "chat_template_jinja": "model: {tokenizer: {chat_template: FILE}}",
    "eot_tokens": "omit it: a chat has the end tokens of its template",
    "tokens": (
        "model: {tokenizer: FOLDER, resize_token_embeddings: true}, with a tokenizer that has "
        "these tokens"
    ),
    "added_tokens_overrides": "model.tokenizer: a folder with the changed tokenizer",
    "resize_token_embeddings_to_32x": "model.resize_token_embeddings: the number of rows",
    "mean_resizing_embeddings": "omit it: new rows are close to the mean of the old ones",
    "shrink_embeddings": "omit it: model.resize_token_embeddings removes no rows",
    "datasets": "mixture: {informs: [{data_files: ..., content_field: ...}]}",
    "test_datasets": "mixture.eval_informs",
    "pretraining_dataset": "mixture: {informs: [...], streaming: true}",
    "streaming": "mixture.streaming",
    "dataset_prepared_path": "mixture.cache_dir",
    "dataset_processes": "mixture.tokenization: {num_proc: 4}",
    "shuffle_merged_datasets": "mixture.shuffle_buffer_size",
    "skip_prepare_dataset": "omit it: only missing tokens are prepared",
    "push_dataset_to_hub": "mixture.save, and `hf upload` after the run",
    "eval_sample_packing": "mixture.pack_tokens, which also packs held-out texts",
    "max_packed_sequence_len": "mixture.pack_seq_length",
    "sample_packing_sequentially": "mixture.pack_strategy: greedy",
    "excess_length_strategy": "mixture.tokenization.truncation",
    "max_prompt_len": "trainer.max_prompt_length",
    "adapter": "the section lora; for qlora also quantization: {model: {quantization_method: nf4}}",
    "lora_model_dir": "lora.name_or_path",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_target_parameters": "lora.targets",
    "peft_use_dora": "lora.dora",
    "peft_use_rslora": "lora.rslora",
    "loraplus_lr_ratio": _RATES,
    "embedding_lr": _RATES,
    "embedding_lr_scale": _RATES,
    "lr_groups": _RATES,
    "unfrozen_parameters": "trainer.trainable_rules, pairs of a pattern and true or false",
    "freeze_mm_modules": "trainer.trainable_rules, pairs of a pattern and true or false",
    "lora_mlp_kernel": _COMPILED,
    "lora_qkv_kernel": _COMPILED,
    "lora_o_kernel": _COMPILED,
    "use_kernels": _COMPILED,
    "liger_rms_norm": _COMPILED,
    "liger_rope": _COMPILED,
    "liger_glu_activation": _COMPILED,
    "liger_layer_norm": _COMPILED,
    "flash_attn_fuse_mlp": _COMPILED,
    "flash_attn_rms_norm": _COMPILED,
    "liger_fused_linear_cross_entropy": _LOGITS,
    "cut_cross_entropy": _LOGITS,
    "chunked_cross_entropy": _LOGITS,
    "flash_attn_cross_entropy": _LOGITS,
    "plugins": "omit it: entry points register families, kernels and methods",
    "strict": "omit it: an unknown key is always an error",
    "flex_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "eager_attention": "base_config: {values: {attn_mechanism: vanilla}}",
    "float16": "loader: {dtype: fp16}",
    "bfloat16": _DTYPE,
    "float32": "loader: {dtype: fp32}",
    "fsdp_version": _MESH,
    "dp_shard_size": _MESH,
    "dp_replicate_size": _MESH,
    "context_parallel_size": _MESH,
    "sequence_parallel_degree": _MESH,
    "tensor_parallel_size": _MESH,
    "expert_parallel_size": _MESH,
    "ddp": _MESH,
    "device_map": _MESH,
    "low_cpu_mem_usage": "omit it: weights are read directly into their shards",
    "qat": "quantization: {model: {quantization_method: int8, simulate: true}}",
    "rl": "trainer.trainer_type, such as dpo, kto, orpo, simpo or grpo",
    "rl_beta": "trainer.beta",
    "orpo_alpha": "trainer.beta",
    "dpo_loss_type": "trainer.loss_type",
    "dpo_label_smoothing": "trainer.label_smoothing",
    "kto_desirable_weight": "trainer.desirable_weight",
    "kto_undesirable_weight": "trainer.undesirable_weight",
    "process_reward_model": "trainer: {trainer_type: prm}",
    "trl": "the section trainer, with the keys of its trainer_type",
    "vllm": "the section esurge",
    "loss_watchdog_threshold": "trainer.skip_bad_steps",
    "loss_watchdog_patience": "trainer.rolling_interval_length",
    "auto_resume_from_checkpoints": "trainer.resume_if_possible",
    "wandb_entity": "the environment variable WANDB_ENTITY",
    "wandb_watch": _NONE,
    "wandb_log_model": _NONE,
    "use_mlflow": "trainer.report_to: mlflow",
    "mlflow_experiment_name": "trainer.project",
    "trackio_project_name": "trainer.project",
    "trackio_run_name": "trainer.run_name",
    "hf_use_auth_token": "the environment variable HF_TOKEN",
    "gptq": "omit it: the format of a quantized checkpoint is read from its config.json",
    "torchdistx_path": _NONE,
}

#: Key of a file of TRL's command line that belongs to no trainer -> its place here.
TRL_KEYS: dict[str, str] = {
    "model_name_or_path": "model: {name_or_path: ...}",
    "model_revision": "model: {extra_kwargs: {revision: ...}}",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "attn_implementation": _ATTENTION,
    "use_peft": "the section lora",
    "use_dora": "lora.dora",
    "use_rslora": "lora.rslora",
    "lora_task_type": "omit it: the task of the model is used",
    "bnb_4bit_quant_type": "quantization: {model: {quantization_method: nf4}}",
    "bnb_4bit_quant_storage": "omit it: codes are stored in their own dtype",
    "use_bnb_nested_quant": "quantization: {model: {double_quantization: true}}",
    "dataset_name": "mixture: {informs: [{type: ORG/NAME}]}",
    "dataset_config": "dataset_split_name of an entry of mixture.informs",
    "dataset_train_split": "split of an entry of mixture.informs",
    "dataset_test_split": "split of an entry of mixture.eval_informs",
    "dataset_streaming": "mixture.streaming",
    "test_split_size": "mixture.eval_fraction",
}


def place(key: str) -> str | None:
    """Return the place of a key of another program's file, or None if the key is unknown.

    Options of a trainer, and the names in `ed_trainers.options.other_names`, are known too.
    """
    if key_place := AXOLOTL_KEYS.get(key) or TRL_KEYS.get(key):
        return key_place
    for options in ARGUMENTS.values():
        if key in options.model_fields or key in options.ALIASES:
            return f"trainer.{options.ALIASES.get(key, key)}"
    text = EQUIVALENT.get(key)
    if text is not None and re.split(r"[:;, ]", text)[0] in _OPTIONS:
        return f"trainer.{text}"
    return text


#: Every option of a trainer, with its other spellings.
_OPTIONS = {
    name for options in ARGUMENTS.values() for name in (*options.model_fields, *options.ALIASES)
}
