"""A run that resumes with another dtype of its parameters reports the change."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.checkpoints.run_record import compare_runs, describe_run

SETTINGS = {
    "total_batch_size": 8,
    "log_steps": 1,
    "save_steps": 2,
    "use_tensorboard": False,
}


def test_changed_dtype_of_parameters_is_reported() -> None:
    arguments = SFTArguments()

    def run(dtype: str | None):
        return describe_run(
            arguments, total_steps=3, loader={}, fingerprint=None, param_dtype=dtype
        )

    said = compare_runs(run("float32"), run("bfloat16"), "x", lambda loader: "")
    assert said == "changed since that checkpoint: param_dtype float32 -> bfloat16"
    assert compare_runs(run("float32"), run("float32"), "x", lambda loader: "") is None
    earlier = {name: value for name, value in run(None).items() if name != "param_dtype"}
    assert compare_runs(earlier, run("bfloat16"), "x", lambda loader: "") is None


@pytest.mark.daily("True")
@pytest.mark.parametrize("changes", [True, False])
def test_resumed_run_prints_the_changed_dtype(toy, tmp_path, capsys, changes: bool) -> None:
    def train(steps: int, dtype) -> str:
        arguments = SFTArguments(save_directory=str(tmp_path), max_training_steps=steps, **SETTINGS)
        model = toy.model(param_dtype=dtype)
        SFTTrainer(arguments, model=model, train_dataset=toy.loader()).train()
        return capsys.readouterr().out

    train(2, jnp.bfloat16)
    said = train(4, jnp.float32 if changes else jnp.bfloat16)
    assert "resumed from step 2 of 4" in said
    assert ("param_dtype bfloat16 -> float32" in said) == changes
