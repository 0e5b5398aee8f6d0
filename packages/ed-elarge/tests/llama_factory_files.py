"""Files of LLaMA-Factory, with the values that their run files have, and their data sets."""

from __future__ import annotations

from foreign_files import ForeignCase

#: `dataset_info.json` of the files below.
DATASET_INFO = {
    "identity": {"file_name": "identity.json"},
    "renamed": {
        "file_name": "renamed.json",
        "columns": {"prompt": "question", "query": "context", "response": "answer"},
    },
    "talk": {
        "hf_hub_url": "org/talk",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "system": "head"},
    },
    "chats": {
        "hf_hub_url": "org/chats",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "better", "rejected": "worse"},
    },
    "labelled": {
        "file_name": "labelled.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "liked"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "texts": {"hf_hub_url": "org/texts", "subset": "en", "columns": {"prompt": "text"}},
}
LLAMA_FACTORY = {
    "lora sft": ForeignCase(
        """
model_name_or_path: org/model
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,renamed,talk
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
""",
        {
            "lora.rank": 8,
            "lora.alpha": 16,
            "loader.trust_remote_code": True,
            "mixture.informs": [
                {"data_files": "data/identity.json", "format": "alpaca", "num_rows": 1000},
                {
                    "data_files": "data/renamed.json",
                    "format": "alpaca",
                    "format_fields": {
                        "question": "instruction",
                        "context": "input",
                        "answer": "output",
                    },
                    "num_rows": 1000,
                },
                {
                    "type": "org/talk",
                    "format": "sharegpt",
                    "format_fields": {"turns": "conversations", "head": "system"},
                    "num_rows": 1000,
                },
            ],
            "trainer.total_batch_size": 8,
            "trainer.eval_batch_size": 1,
            "trainer.evaluation_steps": 500,
            "trainer.num_train_epochs": 3.0,
            "base_config.values.gradient_checkpointing": "nothing_saveable",
        },
    ),
    "qlora": ForeignCase(
        """
model_name_or_path: org/model
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: chats
template: qwen
cutoff_len: 512
neat_packing: true
flash_attn: fa2
per_device_train_batch_size: 2
""",
        {
            "quantization.model.quantization_method": "nf4",
            "quantization.model.double_quantization": False,
            "lora.targets": ["q_proj", "v_proj"],
            "mixture.informs": [{"type": "org/chats", "content_field": "messages"}],
            "mixture.pack_tokens": True,
            "mixture.tokenization.assistant_only_loss": True,
            "trainer.learning_rate": 5e-5,
        },
    ),
    "pissa": ForeignCase(
        """
model_name_or_path: org/model
stage: sft
finetuning_type: lora
lora_rank: 8
pissa_init: true
pissa_iter: 4
pissa_convert: true
dataset: chats
template: qwen
""",
        {"lora.rank": 8, "lora.init_lora_weights": "pissa_niter_4"},
    ),
    "full with deepspeed": ForeignCase(
        """
model_name_or_path: org/model
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity
template: default
pure_bf16: true
max_steps: 30
packing: false
mask_history: true
""",
        {
            "loader.param_dtype": "bfloat16",
            "trainer.max_training_steps": 30,
            "trainer.scheduler": "linear",
        },
        ("template", "mask_history"),
    ),
    "pretraining": ForeignCase(
        """
model_name_or_path: org/model
stage: pt
finetuning_type: lora
dataset: texts
cutoff_len: 1024
""",
        {
            "trainer.trainer_type": "sft",
            "mixture.pack_tokens": True,
            "mixture.informs": [
                {"type": "org/texts", "dataset_split_name": "en", "content_field": "text"}
            ],
        },
    ),
    "dpo with simpo": ForeignCase(
        """
model_name_or_path: org/model
stage: dpo
pref_beta: 2.0
pref_loss: simpo
simpo_gamma: 0.6
finetuning_type: lora
dataset: pairs
template: llama3
""",
        {
            "trainer.trainer_type": "simpo",
            "trainer.beta": 2.0,
            "trainer.simpo_gamma": 0.6,
            "mixture.informs": [
                {
                    "data_files": "data/pairs.json",
                    "format": "alpaca",
                    "format_fields": {"better": "chosen", "worse": "rejected"},
                }
            ],
        },
    ),
    "kto": ForeignCase(
        """
model_name_or_path: org/model
stage: kto
pref_beta: 0.1
kto_rejected_weight: 0.5
finetuning_type: lora
dataset: labelled
template: llama3
""",
        {
            "trainer.trainer_type": "kto",
            "trainer.undesirable_weight": 0.5,
            "mixture.informs": [
                {"data_files": "data/labelled.json", "format_fields": {"liked": "label"}}
            ],
        },
    ),
}
