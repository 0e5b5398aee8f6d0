"""Train on pairs and on rewards with one object for each method."""

import easydel as ed
from easydel.infra.elarge import eLargeModel

pairs = [{"prompt": f"{i}? ", "chosen": f"{i}!", "rejected": "no"} for i in range(8)]
elm = (
    eLargeModel.from_pretrained("model")
    .set_dtype("fp32")
    .set_reference_model("model")
    .set_trainer(
        "dpo",
        beta=0.1,
        max_length=32,
        total_batch_size=4,
        max_training_steps=2,
        save_directory="dpo",
    )
)
assert elm.train(train_dataset=pairs).trained_steps == 2


def reward(completions, **columns):
    return [float(len(str(one))) for one in completions]


grpo = ed.eLargeModel.from_pretrained("model").set_dtype("fp32")
grpo.set_trainer(
    "grpo",
    num_generations=2,
    max_prompt_length=8,
    max_completion_length=4,
    total_batch_size=4,
    max_training_steps=2,
    save_directory="grpo",
)
prompts = [{"prompt": f"number {i}"} for i in range(8)]
assert grpo.train(train_dataset=prompts, reward_funcs=reward).trained_steps == 2
