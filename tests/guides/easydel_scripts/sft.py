"""Fine-tune on texts."""

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
        add_special_tokens=False,
        packing=False,
        weight_decay=0.01,
        scheduler=ed.EasyDeLSchedulers.LINEAR,
        optimizer=ed.EasyDeLOptimizers.ADAMW,
        gradient_accumulation_steps=2,
        save_steps=500,
        save_total_limit=2,
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
output = trainer.train()
assert output.trained_steps == 2
trainer.model.save_pretrained("tuned")
