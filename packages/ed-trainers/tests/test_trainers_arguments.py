"""Options of the trainers: names, defaults, conflicts, and that reading them needs no jax."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ed_infra.errors import ConfigError
from ed_trainers.arguments import ARGUMENTS, SFTArguments, TrainingArguments, arguments_class
from pydantic import ValidationError


def test_defaults_are_easydels():
    base = TrainingArguments()
    assert (base.learning_rate, base.num_train_epochs, base.total_batch_size) == (5e-5, 10, 32)
    assert (base.optimizer, base.scheduler, base.weight_decay) == ("adamw", "none", 0.01)
    assert (base.log_steps, base.report_steps, base.save_steps) == (10, 5, None)
    assert base.save_directory == "EasyDeL-Checkpoints"
    assert SFTArguments().learning_rate == 2e-5


@pytest.mark.parametrize(
    ("given", "where", "words"),
    [
        ({"learning_ratee": 1}, "learning_ratee", "did you mean 'learning_rate'"),
        ({"optimizer": "adam"}, "optimizer", "did you mean 'adamw'"),
        ({"scheduler": "cosin"}, "scheduler", "did you mean 'cosine'"),
        ({"total_batch_size": 6, "gradient_accumulation_steps": 4}, None, "does not divide"),
        ({"learning_rate_end": 0.1}, "learning_rate_end", "no effect with scheduler 'none'"),
        ({"optimizer": "sgd", "tx_mu_dtype": "bf16"}, "tx_mu_dtype", "no effect"),
        (
            {"optimizer_kwargs": {"b3": 1}},
            ("optimizer_kwargs", "b3"),
            "unknown setting of adamw 'b3'",
        ),
        ({"training_time_limit": "3 weeks"}, "training_time_limit", "'90s', '50min'"),
        ({"tx_mu_dtype": "bf15"}, "tx_mu_dtype", "did you mean 'bf16'"),
        ({"save_steps": 0}, "save_steps", "greater than 0"),
    ],
)
def test_a_mistake_is_an_error_at_its_key(given, where, words):
    with pytest.raises(ValidationError) as caught:
        SFTArguments(**given)
    problem = caught.value.errors()[0]
    assert words in problem["msg"]
    if where is not None:
        assert problem["loc"] == (where if isinstance(where, tuple) else (where,))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("50min", 3000.0),
        ("1h30m", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_durations(text, seconds):
    assert SFTArguments(training_time_limit=text).training_time_limit == seconds


def test_what_is_none_by_default_may_be_given_as_none():
    unset = {
        name: None for name, field in SFTArguments.model_fields.items() if field.default is None
    }
    assert "training_time_limit" in unset
    assert SFTArguments(**unset) == SFTArguments()


def test_spellings_become_canonical():
    # PyYAML reads 2e-5 as a string.
    arguments = SFTArguments(learning_rate="2e-5", tx_mu_dtype="bf16", master_dtype="fp32")
    assert (arguments.learning_rate, arguments.tx_mu_dtype) == (2e-5, "bfloat16")
    assert arguments.master_dtype == "float32"
    assert SFTArguments(extra_optimizer_kwargs={"b2": 0.95}).optimizer_kwargs == {"b2": 0.95}


def test_registry_names_every_method():
    assert arguments_class("sft") is SFTArguments
    for name, cls in ARGUMENTS.items():
        assert cls().trainer_type == name
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        arguments_class("stf")


def test_reading_options_imports_no_jax():
    code = (
        "import sys, ed_trainers, ed_trainers.arguments as a; a.SFTArguments();"
        "ed_trainers.SFTArguments;"
        "print([m for m in ('jax', 'flax', 'optax', 'orbax', 'tensorboardX') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
