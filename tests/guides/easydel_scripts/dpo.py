"""Align a model with pairs."""

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
reference_model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model", dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 1, 1, 1, 1)
)

rows = [
    {
        "prompt": [{"role": "user", "content": f"{i}?"}],
        "chosen": [{"role": "assistant", "content": f"{i}!"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for i in range(8)
]
trainer = ed.DPOTrainer(
    arguments=ed.DPOConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        beta=0.1,
        loss_type="sigmoid",
        max_length=64,
        precompute_ref_log_probs=False,
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    reference_model=reference_model,
)
output = trainer.train()
assert output.trained_steps == 2
