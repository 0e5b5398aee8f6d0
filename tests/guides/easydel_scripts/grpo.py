"""Learn from rewards of completions."""

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


def reward_length(prompts, completions, **columns):
    return [float(len(str(completion))) for completion in completions]


rows = [{"prompt": f"number {i}"} for i in range(8)]
trainer = ed.GRPOTrainer(
    arguments=ed.GRPOConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        num_generations=2,
        max_prompt_length=16,
        max_completion_length=4,
        temperature=0.9,
        beta=0.04,
    ),
    model=model,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    reward_funcs=reward_length,
)
output = trainer.train()
assert output.trained_steps == 2
