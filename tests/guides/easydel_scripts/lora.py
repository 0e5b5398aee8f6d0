"""Train adapters, and merge them."""

import easydel as ed
import jax.numpy as jnp
from datasets import Dataset
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    sharding_axis_dims=(1, 1, 1, 1, 1),
    auto_shard_model=True,
)
model = model.apply_lora_to_layers(lora_rank=4, lora_pattern=".*(q_proj|v_proj).*")
assert model.lora_is_enabled

rows = [{"text": f"the number {i} and an answer {i + 1}"} for i in range(8)]
trainer = ed.SFTTrainer(
    arguments=ed.SFTConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        max_length=32,
        dataset_text_field="text",
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
output = trainer.train()
assert output.trained_steps == 2
adapters = trainer.model.split_lora_params()
merged = trainer.model.merge_lora_params(adapters).unwrap_lora_to_layers()
assert not merged.lora_is_enabled
merged.save_pretrained("merged")
