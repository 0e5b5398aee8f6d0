"""Train with odds ratios of pairs."""

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

rows = [
    {
        "prompt": [{"role": "user", "content": f"{i}?"}],
        "chosen": [{"role": "assistant", "content": f"{i}!"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for i in range(8)
]
trainer = ed.ORPOTrainer(
    arguments=ed.ORPOConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        beta=0.1,
        max_length=64,
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
output = trainer.train()
assert output.trained_steps == 2
