"""Distill a teacher."""

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
teacher_model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model", dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 1, 1, 1, 1)
)

rows = [{"text": f"the number {i} and an answer {i + 1}"} for i in range(8)]
trainer = ed.DistillationTrainer(
    arguments=ed.DistillationConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        max_length=32,
        temperature=2.0,
        alpha=0.5,
    ),
    student_model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    teacher_model=teacher_model,
)
output = trainer.train()
assert output.trained_steps == 2
