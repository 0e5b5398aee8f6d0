"""Options of the trainers: names, defaults, conflicts, and that reading them needs no jax."""

from __future__ import annotations

import inspect
import subprocess
import sys

import jax
import optax
import pytest
from ed_infra.errors import ConfigError
from ed_infra.options import Options
from ed_trainers.arguments import (
    ARGUMENTS,
    METHODS,
    OPTIMIZERS,
    SFTArguments,
    TrainingArguments,
    arguments_class,
    idle_options,
)
from ed_trainers.methods import trainer_class
from pydantic import ValidationError


def test_training_argument_defaults_match_easydel():
    base = TrainingArguments()
    assert (base.learning_rate, base.num_train_epochs, base.total_batch_size) == (5e-5, 10, 32)
    assert (base.optimizer, base.scheduler, base.weight_decay) == ("adamw", "none", 0.01)
    assert (base.log_steps, base.report_steps, base.save_steps) == (10, 5, None)
    assert base.save_directory == "EasyDeL-Checkpoints"
    assert SFTArguments().learning_rate == 2e-5
    assert arguments_class("dpo")().learning_rate == arguments_class("orpo")().learning_rate == 1e-6
    moves = arguments_class("dpo")()
    assert (moves.ref_model_mixup_alpha, moves.ref_model_sync_steps) == (0.9, 64)


@pytest.mark.parametrize("method", METHODS)
def test_a_default_is_that_of_the_nearest_class(method):
    """pydantic uses a field of the first base class, even if the second has a narrower type."""
    kind = METHODS[method].arguments
    for name, field in kind.model_fields.items():
        nearest = next(cls for cls in kind.__mro__ if name in vars(cls).get("__annotations__", {}))
        assert field.default == nearest.model_fields[name].default, (name, nearest)


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
        (
            {"optimizer": "muon", "optimizer_kwargs": {"adjust_lr_fn": "moonlight"}},
            ("optimizer_kwargs", "adjust_lr_fn"),
            "match_rms_adamw",
        ),
        (
            {"scheduler": "wsd", "scheduler_kwargs": {"decay_steps": 3}},
            ("scheduler_kwargs", "decay_steps"),
            "unknown setting of wsd 'decay_steps'; did you mean 'num_decay_steps'",
        ),
        (
            {"scheduler": "cosine", "scheduler_kwargs": {"power": 3}},
            ("scheduler_kwargs", "power"),
            "known: decay_steps",
        ),
        ({"optimizer": "muon", "tx_mu_dtype": "bf16"}, "tx_mu_dtype", "no effect"),
        ({"skip_bad_steps": 1}, "skip_bad_steps", "valid boolean"),
        ({"sigma_factor": 0}, "sigma_factor", "greater than 0"),
        ({"rolling_interval_length": 2}, "rolling_interval_length", "greater than or equal to 4"),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor", "less than 1"),
        ({"z_loss_coefficient": -1}, "z_loss_coefficient", "greater than or equal to 0"),
        ({"neftune_noise_alpha": 0}, "neftune_noise_alpha", "greater than 0"),
        ({"training_time_limit": "3 weeks"}, "training_time_limit", "'90s', '50min'"),
        ({"tx_mu_dtype": "bf15"}, "tx_mu_dtype", "did you mean 'bf16'"),
        ({"save_steps": 0}, "save_steps", "greater than 0"),
        ({"optimizer_kwargs": {"b2": "fast"}}, ("optimizer_kwargs", "b2"), "valid number"),
        ({"optimizer_kwargs": {"b2": 1.0}}, ("optimizer_kwargs", "b2"), "less than 1"),
        (
            {"optimizer": "sgd", "optimizer_kwargs": {"nesterov": "yes"}},
            ("optimizer_kwargs", "nesterov"),
            "valid boolean",
        ),
        ({"learning_rate": float("inf")}, "learning_rate", "finite"),
        ({"learning_rate": True}, "learning_rate", "not true or false"),
        ({"optimizer_kwargs": {"eps": True}}, ("optimizer_kwargs", "eps"), "not true or false"),
        ({"trainable_rules": [["a", True], "b"]}, ("trainable_rules", 1), "valid tuple"),
        ({"learning_rate": float("nan")}, "learning_rate", "finite"),
        ({"weight_decay": float("inf")}, "weight_decay", "finite"),
        ({"clip_grad": float("inf")}, "clip_grad", "finite"),
        ({"training_time_limit": float("inf")}, "training_time_limit", "finite"),
        ({"warmup_steps": 10**9}, "warmup_steps", "less than or equal to"),
        ({"max_training_steps": 10**12}, "max_training_steps", "less than or equal to"),
        ({"total_batch_size": 10**10}, "total_batch_size", "less than or equal to"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**32}, "seed", "less than or equal to 4294967295"),
        ({"tx_mu_dtype": "int8"}, "tx_mu_dtype", "int8"),
        ({"weight_decay_rules": [["(", 0.0]]}, ("weight_decay_rules", 0), "is not a pattern"),
        ({"weight_decay_rules": [["x", -1]]}, ("weight_decay_rules", 0, 1), "greater than or"),
        ({"learning_rate_rules": [["x", 0]]}, ("learning_rate_rules", 0, 1), "greater than 0"),
        ({"trainable_rules": [["x", 1]]}, ("trainable_rules", 0, 1), "valid boolean"),
        ({"save_directory": __file__}, "save_directory", "is a file"),
        ({"save_directory": f"{__file__}/runs"}, "save_directory", "is a file"),
        ({"save_directory": " "}, "save_directory", "is empty"),
        ({"save_directory": "s3://bucket/run"}, "save_directory", "set mirror_address"),
        ({"mirror_address": "s3://"}, "mirror_address", "names no bucket"),
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
def test_time_limits_parse_from_durations(text, seconds):
    assert SFTArguments(training_time_limit=text).training_time_limit == seconds


def test_arguments_with_none_default_accept_none():
    unset = {
        name: None for name, field in SFTArguments.model_fields.items() if field.default is None
    }
    assert "training_time_limit" in unset
    assert SFTArguments(**unset) == SFTArguments()


def test_argument_spellings_resolve_to_canonical_values():
    # PyYAML reads 2e-5 as a string.
    arguments = SFTArguments(learning_rate="2e-5", tx_mu_dtype="bf16", master_dtype="fp32")
    assert (arguments.learning_rate, arguments.tx_mu_dtype) == (2e-5, "bfloat16")
    assert arguments.master_dtype == "float32"
    assert SFTArguments(extra_optimizer_kwargs={"b2": 0.95}).optimizer_kwargs == {"b2": 0.95}


def test_registry_lists_every_training_method():
    assert arguments_class("sft") is SFTArguments
    for name, cls in ARGUMENTS.items():
        assert cls().trainer_type == name
    for wrong in ("stf", ["sft"], None):
        with pytest.raises(ConfigError, match=r"known: .*\bsft\b"):
            arguments_class(wrong)
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        trainer_class("stf")


def test_every_method_has_its_trainer():
    for name, entry in METHODS.items():
        trainer = trainer_class(name)
        assert trainer.entry.arguments is entry.arguments
        assert entry.method == f"{trainer.__module__}:{trainer.__name__}"


#: Optimizers of optax, and the parts of our optimizers with other names.
OPTAX = {
    "adamw": optax.adamw,
    "adamw_8bit": optax.adamw,
    "lion": optax.lion,
    "lion_8bit": optax.lion,
    "adafactor": optax.adafactor,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
    "schedule_free_adamw": optax.contrib.schedule_free_adamw,
    "adopt": optax.contrib.adopt,
    "ademamix": optax.contrib.ademamix,
}
#: Settings that optax does not have, by optimizer.
OWN_SETTINGS = {
    "adamw_8bit": {"block_size"},
    "lion_8bit": {"block_size"},
    "ademamix": {"alpha_warmup", "b3_warmup"},
}


def test_only_optimizers_outside_optax_have_own_settings():
    assert set(OPTIMIZERS) - set(OPTAX) == {
        "muon",
        "muon_8bit",
        "mars",
        "quad",
        "skew",
        "soap",
        "dion",
    }


@pytest.mark.parametrize("name", sorted(OPTAX))
def test_settings_of_optimizers_are_those_of_optax(name):
    known = inspect.signature(OPTAX[name]).parameters
    settings = OPTIMIZERS[name]()
    own = OWN_SETTINGS.get(name, set()) | {"cautious"}
    for key, value in settings.model_dump(exclude=own).items():
        assert key in known, key
        assert value == known[key].default, key


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, []),
        ({"max_training_steps": 10, "num_train_epochs": 2}, ["num_train_epochs"]),
        ({"max_training_steps": 10, "warmup_steps": 10}, ["warmup_steps"]),
        (
            {"max_training_steps": 10, "warmup_steps": 20, "scheduler": "cosine"},
            ["warmup_steps", "scheduler"],
        ),
        ({"max_training_steps": 10, "warmup_steps": 9, "scheduler": "linear"}, []),
        (
            {"max_training_steps": 10, "save_steps": 11, "evaluation_steps": 20},
            ["save_steps", "evaluation_steps"],
        ),
        ({"max_training_steps": 10, "save_steps": 10, "evaluation_steps": 5}, []),
        (
            {"optimizer": "sgd", "optimizer_kwargs": {"nesterov": True}},
            ["optimizer_kwargs"],
        ),
        (
            {"optimizer": "sgd", "optimizer_kwargs": {"nesterov": True, "momentum": 0.9}},
            [],
        ),
        (
            {"sigma_factor": 3.0, "rolling_interval_length": 9},
            [
                "sigma_factor",
                "rolling_interval_length",
            ],
        ),
        ({"sigma_factor": 3.0, "skip_bad_steps": True}, []),
    ],
)
def test_options_that_do_nothing_are_named(given, keys):
    idle = idle_options(SFTArguments(**given))
    assert [key for key, _ in idle] == keys
    assert all(reason for _, reason in idle)


def test_the_largest_seed_is_a_seed():
    assert jax.random.key(SFTArguments(seed=2**32 - 1).seed) != jax.random.key(0)


def test_reading_options_imports_no_jax():
    code = (
        "import sys, ed_trainers, ed_trainers.arguments as a; a.SFTArguments();"
        "ed_trainers.SFTArguments;"
        "print([m for m in ('jax', 'flax', 'optax', 'orbax', 'tensorboardX') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("method", METHODS)
def test_options_of_a_method_have_at_most_two_bases_three_levels_and_four_files(method):
    classes = [cls for cls in ARGUMENTS[method].__mro__ if issubclass(cls, Options)]
    assert count_levels(ARGUMENTS[method]) <= 3, "below a class that derives from Options"
    assert max(len(cls.__bases__) for cls in classes) <= 2
    assert len({cls.__module__ for cls in classes}) <= 4, "one of them is ed_infra.options"


def count_levels(cls):
    """Return the number of classes between a class of options and the first class of its chain."""
    return max((1 + count_levels(base) for base in cls.__bases__ if base is not Options), default=0)


@pytest.mark.parametrize("method", ["grpo", "gspo", "gfpo", "sdpo", "sdft", "rloo", "rlvr", "ppo"])
def test_batch_of_prompts_has_the_completions_of_each_prompt(method):
    kind = arguments_class(method)
    given = {"num_return_sequences": 6, "steps_per_generation": 2}
    given |= {"num_remains_in_group": 3} if method == "gfpo" else {}
    per_prompt = 3 if method == "gfpo" else 6
    prompts = kind(total_batch_size=5, batch_unit="prompts", gradient_accumulation_steps=3, **given)
    completions = kind(total_batch_size=5 * per_prompt, gradient_accumulation_steps=3, **given)
    assert completions.batch_unit == "completions"
    for name in ("sequences_per_step", "loader_batch_size", "completions_per_generation"):
        assert getattr(prompts, name) == getattr(completions, name)
    assert (prompts.loader_batch_size, prompts.sequences_per_step) == (10, 5 * per_prompt)
    # A generation of prompts is always whole; the batch of completions is not.
    assert kind(total_batch_size=7, batch_unit="prompts", **given).loader_batch_size == 14
    with pytest.raises(ValidationError, match=r"not a multiple of .* set batch_unit: prompts"):
        kind(total_batch_size=7, **given)
    with pytest.raises(ValidationError, match=f"5, which is {5 * per_prompt} sequences, does"):
        kind(total_batch_size=5, batch_unit="prompts", gradient_accumulation_steps=4, **given)
    with pytest.raises(ValidationError, match="batch_unit"):
        kind(batch_unit="rows")


@pytest.mark.parametrize("method", ["sft", "gkd", "xpo"])
def test_methods_with_one_completion_of_a_prompt_have_no_unit(method):
    assert "batch_unit" not in arguments_class(method).model_fields
    assert arguments_class(method)().sequences_per_step == 32
