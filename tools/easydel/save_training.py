"""Write training checkpoints, adapters and other optimizers with the original EasyDeL.

This program runs in the environment of the original, after `save_folders.py OUT`:

    $EASYDEL_PYTHON tools/easydel/save_training.py OUT

It writes these folders:

    OUT/state/FAMILY            two updates of AdamW with constant gradients (`save_state`)
    OUT/run/tiny/run-2          two steps of the trainer
    OUT/lora, OUT/lora_state    a model with LoRA, and its state
    OUT/lion                    another optimizer
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")


#: Families with a training checkpoint.
STATES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "gpt2", "olmo2"),
    "falcon",
)


def _import_easydel() -> Any:
    """Return the module of the original, whose names differ from those of this project."""
    import easydel

    return easydel


def load(out: Path, family: str) -> Any:
    """Return the model of EasyDeL with the weights of a folder of transformers."""
    import jax.numpy as jnp
    import torch

    ed = _import_easydel()
    return ed.AutoEasyDeLModelForCausalLM.from_pretrained(
        str(out / family / "source"),
        from_torch=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        torch_dtype=torch.float32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )


def save_states(out: Path) -> None:
    """Write a state of each family after two updates of AdamW."""
    import jax
    import jax.numpy as jnp
    import optax

    ed = _import_easydel()
    for family in STATES:
        optimizer = optax.adamw(1e-2)
        state = ed.EasyDeLState.create(model=load(out, family), tx=optimizer, init_opt_state=True)
        for size in (0.01, -0.02):
            gradients = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), state.graphstate)
            state = state.apply_gradients(grads=gradients)
        state.save_state(str(out / "state" / family))


def save_lora(out: Path) -> None:
    """Write a model with adapters on queries and values, and its state."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    ed = _import_easydel()
    model = load(out, "llama").apply_lora_to_layers(4, ".*(q_proj|v_proj).*")
    random = np.random.default_rng(1)
    for _, module in nnx.iter_modules(model):
        matrix: Any = getattr(module, "lora_b", None)
        if matrix is not None:
            values = random.normal(size=matrix.value.shape) * 0.1
            matrix.value = jnp.asarray(values, jnp.float32)
    model.save_pretrained(str(out / "lora"))
    state = ed.EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)
    state.save_state(str(out / "lora_state"))


def save_other_optimizer(out: Path) -> None:
    """Write the state of an optimizer that is not AdamW."""
    import optax

    ed = _import_easydel()
    optimizer = optax.lion(1e-3)
    state = ed.EasyDeLState.create(model=load(out, "llama"), tx=optimizer, init_opt_state=True)
    state.save_state(str(out / "lion"))


def save_run(out: Path) -> None:
    """Train two steps with the trainer, which writes its checkpoint."""
    import numpy as np
    from datasets import Dataset

    ed = _import_easydel()
    ids = np.random.default_rng(0).integers(3, 90, (8, 16)).tolist()
    ones = [[1] * 16] * 8
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": ones, "labels": ids})
    arguments = ed.TrainingArguments(
        model_name="tiny",
        save_directory=str(out / "run"),
        num_train_epochs=1,
        max_training_steps=2,
        total_batch_size=2,
        learning_rate=1e-2,
        optimizer="adamw",
        scheduler="linear",
        learning_rate_end=1e-2,
        weight_decay=0.0,
        clip_grad=1.0,
        save_steps=2,
        max_length=16,
        use_wandb=False,
        do_eval=False,
    )
    ed.Trainer(arguments=arguments, model=load(out, "llama"), dataset_train=rows).train()


def main() -> int:
    """Write all folders, or those that are named, and return the number of failures."""
    out, *names = sys.argv[1:]
    parts: dict[str, Callable[[Path], None]] = {
        "state": save_states,
        "run": save_run,
        "lora": save_lora,
        "lion": save_other_optimizer,
    }
    failures = 0
    for name in names or parts:
        try:
            parts[name](Path(out))
            print(name, "saved", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(name, f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(main())
