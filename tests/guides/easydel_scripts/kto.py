"""Train on single answers with labels."""

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

rows = [{"prompt": f"{i}?", "completion": f"{i}!", "label": bool(i % 2)} for i in range(8)]
trainer = ed.KTOTrainer(
    arguments=ed.KTOConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        max_length=32,
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
output = trainer.train()
assert output.trained_steps == 2
