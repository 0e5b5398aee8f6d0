"""Files of Axolotl, TRL and Unsloth, with the values that their run files have."""

from __future__ import annotations

from typing import Any, NamedTuple


class ForeignCase(NamedTuple):
    """One file: its text, values of the run file, and keys that have no place."""

    text: str
    values: dict[str, Any]
    changes: tuple[str, ...] = ()


AXOLOTL = {
    "lora chats": ForeignCase(
        """
base_model: org/model
datasets:
  - {path: org/chats, type: chat_template, split: "train[:500]"}
val_set_size: 0.05
output_dir: out/lora
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 2
weight_decay: 0.1
wandb_project:
wandb_entity:
""",
        {
            "model.name_or_path": "org/model",
            "mixture.informs": [
                {"type": "org/chats", "num_rows": 500, "content_field": "messages"}
            ],
            "mixture.eval_fraction": 0.05,
            "mixture.pack_tokens": True,
            "mixture.tokenization.assistant_only_loss": True,
            "lora.rank": 32,
            "lora.targets": ["gate_proj", "down_proj", "up_proj", "q_proj"],
            "trainer.total_batch_size": 8,
            "trainer.gradient_accumulation_steps": 4,
            "trainer.evals_per_epoch": 4,
            "trainer.saves_per_epoch": 2,
            "trainer.clip_grad": 1.0,
            "loader.dtype": "bfloat16",
        },
    ),
    "qlora sharegpt": ForeignCase(
        """
base_model: org/model
load_in_4bit: true
adapter: qlora
chat_template: chatml
datasets:
  - path: rows/talk.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
  - {path: json, data_files: rows/more.jsonl, type: sharegpt}
lora_target_linear: true
lora_r: 8
sequence_len: 2048
micro_batch_size: 1
max_steps: 100
optimizer: paged_adamw_32bit
lr_scheduler: linear
learning_rate: 2e-4
warmup_ratio: 0.1
adam_beta2: 0.95
adam_epsilon: 0.00001
deepspeed: deepspeed_configs/zero2.json
special_tokens: {pad_token: "</s>"}
""",
        {
            "quantization.model.quantization_method": "nf4",
            "model.tokenizer.chat_template": "chatml",
            "mixture.informs": [
                {"data_files": "rows/talk.jsonl", "format": "sharegpt"},
                {"type": "json", "data_files": "rows/more.jsonl", "format": "sharegpt"},
            ],
            "trainer.optimizer": "adamw",
            "trainer.optimizer_kwargs": {"b2": 0.95, "eps": 1e-5},
            "trainer.max_training_steps": 100,
            "trainer.learning_rate": 2e-4,
            "trainer.weight_decay": 0.0,
            "trainer.save_strategy": "epoch",
        },
    ),
    "full with fsdp": ForeignCase(
        """
base_model: org/model
datasets: [{path: org/texts, name: small, type: completion, field: body}]
test_datasets: [{path: org/texts, type: completion, field: body, split: validation}]
output_dir: out/full
sequence_len: 8192
sample_packing: true
eval_sample_packing: false
gradient_accumulation_steps: 1
micro_batch_size: 4
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 0.00001
bf16: true
tf32: true
eval_steps: 0.1
save_steps: 0.2
load_best_model_at_end: true
save_total_limit: 2
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: false, fsdp_state_dict_type: FULL_STATE_DICT}
tensor_parallel_size: 2
neftune_noise_alpha: 5
""",
        {
            "mixture.informs": [
                {"type": "org/texts", "dataset_split_name": "small", "content_field": "body"}
            ],
            "mixture.eval_informs": [
                {"type": "org/texts", "split": "validation", "content_field": "body"}
            ],
            "sharding.axis_dims": [1, -1, 1, 2, 1],
            "trainer.learning_rate_end": 1e-6,
            "trainer.evaluation_steps": 0.1,
            "trainer.save_steps": 0.2,
            "trainer.load_best_model_at_end": True,
            "trainer.warmup_ratio": 0.03,
            "trainer.neftune_noise_alpha": 5,
        },
    ),
    "dpo": ForeignCase(
        """
base_model: org/model
rl: dpo
rl_beta: 0.2
datasets:
  - {path: org/pairs, split: train, type: chatml.intel}
  - {path: org/more, type: {field_prompt: question, field_chosen: good, field_rejected: bad}}
adapter: lora
lora_r: 16
lora_alpha: 32
sequence_len: 1024
micro_batch_size: 2
max_steps: 20
optimizer: adamw_torch
lr_scheduler: constant_with_warmup
learning_rate: 5e-6
save_strategy: epoch
""",
        {
            "trainer.trainer_type": "dpo",
            "trainer.beta": 0.2,
            "trainer.scheduler": "constant",
            "mixture.informs": [
                {"type": "org/pairs", "format_fields": {"question": "prompt"}},
                {
                    "type": "org/more",
                    "format_fields": {"question": "prompt", "good": "chosen", "bad": "rejected"},
                },
            ],
        },
    ),
    "grpo": ForeignCase(
        """
base_model: org/model
rl: grpo
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.8, max_model_len: 2048}
trl:
  beta: 0.001
  use_vllm: true
  num_generations: 4
  max_completion_length: 256
  reward_funcs: [think_format_reward]
  reward_weights: [1.0]
  temperature: 0.7
datasets: [{path: rows/questions.jsonl}]
micro_batch_size: 8
max_steps: 10
learning_rate: 1e-6
""",
        {
            "trainer.trainer_type": "grpo",
            "trainer.num_return_sequences": 4,
            "trainer.reward_functions": ["format"],
            "trainer.temperature": 0.7,
            "esurge.hbm_utilization": 0.8,
            "trainer.total_batch_size": 8,
        },
    ),
    "alpaca and older keys": ForeignCase(
        """
base_model: org/model
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
strict: false
datasets: [{path: org/alpaca, type: alpaca}]
dataset_prepared_path: last_run_prepared
adapter: lora
lora_model_dir:
lora_r: 8
lora_fan_in_fan_out:
train_on_inputs: false
group_by_length: false
fp16:
early_stopping_patience: 3
xformers_attention: true
unknown_key: 7
micro_batch_size: 2
learning_rate: 0.0003
num_epochs: 4
val_set_size: 0
eval_steps: 20
""",
        {
            "quantization.model.quantization_method": "int8",
            "mixture.informs": [{"type": "org/alpaca", "format": "alpaca"}],
        },
        ("datasets[0].type", "early_stopping_patience", "unknown_key"),
    ),
}
TRL = {
    "sft lora": ForeignCase(
        """
model_name_or_path: org/model
dataset_name: org/chats
dataset_config: all
dataset_test_split: validation
output_dir: out/sft
use_peft: true
lora_target_modules: all-linear
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
assistant_only_loss: true
eval_strategy: steps
eval_steps: 100
logging_steps: 25
warmup_ratio: 0.03
report_to: [wandb]
run_name: first
push_to_hub: true
hub_model_id: org/mine
attn_implementation: flash_attention_2
""",
        {
            "trainer.trainer_type": "sft",
            "lora.rank": 16,
            "lora.alpha": 32,
            "lora.dropout": 0.05,
            "mixture.informs": [{"type": "org/chats", "dataset_split_name": "all"}],
            "mixture.eval_informs": [
                {
                    "type": "org/chats",
                    "dataset_split_name": "all",
                    "split": "validation",
                }
            ],
            "trainer.max_length": 1024,
            "trainer.total_batch_size": 16,
            "trainer.evaluation_steps": 100,
            "trainer.scheduler": "linear",
            "trainer.weight_decay": 0.0,
            "base_config.values.gradient_checkpointing": "nothing_saveable",
        },
    ),
    "sft qlora of files": ForeignCase(
        """
model_name_or_path: org/model
dtype: bfloat16
load_in_4bit: true
use_bnb_nested_quant: true
use_peft: true
lora_r: 64
lora_modules_to_save: [lm_head]
datasets:
  - {path: json, data_files: rows/a.jsonl}
  - {path: org/b, name: sub, split: "train[:100]", columns: [text]}
dataset_text_field: body
max_length: 512
max_steps: 50
optim: paged_adamw_8bit
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
learning_rate: 1e-4
gradient_checkpointing: false
save_strategy: "no"
""",
        {
            "quantization.model.quantization_method": "nf4",
            "quantization.model.double_quantization": True,
            "lora.rank": 64,
            "lora.modules_to_save": ["lm_head"],
            "mixture.informs": [
                {"type": "json", "data_files": "rows/a.jsonl", "content_field": "body"},
                {
                    "type": "org/b",
                    "dataset_split_name": "sub",
                    "num_rows": 100,
                    "content_field": "body",
                },
            ],
            "trainer.optimizer": "adamw_8bit",
            "trainer.scheduler": "cosine",
            "trainer.learning_rate_end": 1e-5,
            "trainer.save_strategy": "no",
            "trainer.max_training_steps": 50,
        },
    ),
    "dpo": ForeignCase(
        """
model_name_or_path: org/model
dataset_name: org/pairs
precompute_ref_log_probs: true
loss_type: [sigmoid, sft]
loss_weights: [0.8, 1.0]
beta: 0.05
max_length: 2048
per_device_train_batch_size: 4
eval_strategy: epoch
save_strategy: epoch
load_best_model_at_end: true
bf16: true
deepspeed: zero3.json
f_divergence_type: reverse_kl
""",
        {
            "trainer.trainer_type": "dpo",
            "trainer.loss_type": ["sigmoid", "sft"],
            "trainer.loss_weights": [0.8, 1.0],
            "trainer.beta": 0.05,
            "mixture.eval_informs": [{"type": "org/pairs", "split": "test"}],
            "trainer.eval_strategy": "epoch",
            "trainer.load_best_model_at_end": True,
            "trainer.learning_rate": 1e-6,
        },
    ),
    "grpo": ForeignCase(
        """
model_name_or_path: org/model
dataset_name: org/questions
reward_funcs: [accuracy_reward, think_format_reward]
num_generations: 4
max_completion_length: 128
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.3
log_completions: true
loss_type: sapo
sapo_temperature_neg: 2
use_adaptive_entropy: true
repetition_penalty: 1.2
""",
        {
            "trainer.trainer_type": "grpo",
            "trainer.beta": 0.0,
            "trainer.reward_functions": ["math_answer", "format"],
            "mixture.informs": [
                {
                    "type": "org/questions",
                    "format_fields": {"solution": "answer"},
                    "additional_fields": ["answer"],
                }
            ],
            "trainer.steps_per_generation": 2,
            "trainer.total_batch_size": 8,
            "trainer.loss_type": "sapo",
            "trainer.sapo_temperature_neg": 2,
            "trainer.use_adaptive_entropy": True,
            "esurge.hbm_utilization": 0.3,
        },
        ("repetition_penalty",),
    ),
    "kto": ForeignCase(
        """
model_name_or_path: org/model
dataset_name: org/labelled
desirable_weight: 1.5
undesirable_weight: 1.0
num_train_epochs: 2
fsdp: full_shard
logging_first_step: true
""",
        {
            "trainer.trainer_type": "kto",
            "trainer.desirable_weight": 1.5,
            "trainer.total_batch_size": 8,
            "trainer.num_train_epochs": 2,
        },
    ),
    "reward": ForeignCase(
        """
model_name_or_path: org/model
dataset_name: org/pairs
center_rewards_coefficient: 0.01
max_length: 256
eval_strategy: steps
eval_steps: 0.25
eval_on_start: true
warmup_steps: 0.1
disable_dropout: true
loss_weights: [0.5, 0.5]
""",
        {
            "trainer.trainer_type": "reward",
            "trainer.center_rewards_coefficient": 0.01,
            "trainer.learning_rate": 1e-4,
            "trainer.evaluation_steps": 0.25,
            "trainer.eval_on_start": True,
            "trainer.warmup_steps": 0.1,
        },
        ("loss_weights",),
    ),
}
UNSLOTH = {
    "lora": ForeignCase(
        """
model: org/model
data: {dataset: org/alpaca, format_type: alpaca}
training:
  training_type: lora
  max_seq_length: 1024
  load_in_4bit: true
  output_dir: out/unsloth
  num_epochs: 1
  learning_rate: 0.0001
  batch_size: 4
  gradient_accumulation_steps: 2
  train_on_completions: true
lora: {lora_r: 16, lora_alpha: 32, target_modules: "q_proj,v_proj"}
logging: {enable_wandb: true, wandb_project: mine}
""",
        {
            "quantization.model.quantization_method": "nf4",
            "lora.targets": ["q_proj", "v_proj"],
            "mixture.informs": [{"type": "org/alpaca", "format": "alpaca"}],
            "trainer.total_batch_size": 8,
            "trainer.optimizer": "adamw_8bit",
            "trainer.seed": 3407,
            "trainer.project": "mine",
        },
    ),
    "full": ForeignCase(
        """
model: org/model
data: {local_dataset: [rows/a.jsonl, rows/b.jsonl], format_type: auto}
training: {training_type: full, max_steps: 30, save_steps: 10, packing: true}
lora: {use_loftq: true}
""",
        {
            "mixture.informs": [{"data_files": "rows/a.jsonl"}, {"data_files": "rows/b.jsonl"}],
            "trainer.max_training_steps": 30,
            "trainer.save_steps": 10,
            "mixture.pack_tokens": True,
        },
    ),
    "codes": ForeignCase(
        """
model: org/model
data: {dataset: org/alpaca}
training: {training_type: lora, load_in_4bit: true}
lora: {lora_r: 8, use_loftq: true}
""",
        {"lora.rank": 8, "lora.init_lora_weights": "loftq"},
    ),
}
