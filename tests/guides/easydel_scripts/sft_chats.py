"""Fine-tune on packed conversations, and evaluate."""

import easydel as ed
import jax.numpy as jnp
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
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
    for i in range(8)
]
trainer = ed.SFTTrainer(
    arguments=ed.SFTConfig(
        total_batch_size=4,
        max_training_steps=2,
        learning_rate=1e-3,
        report_steps=1,
        use_wandb=False,
        progress_bar_type="tqdm",
        save_directory="runs",
        max_length=64,
        packing=True,
        do_eval=True,
        evaluation_steps=2,
        eval_batch_size=4,
        assistant_only_loss=False,
    ),
    model=model,
    train_dataset=rows,
    processing_class=tokenizer,
    eval_dataset=rows[:4],
)
output = trainer.train()
assert output.trained_steps == 2
