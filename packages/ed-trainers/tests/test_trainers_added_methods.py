"""Methods of other packages: one file with a record, and one entry point."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers import arguments, trainer_class
from ed_trainers.arguments import METHODS, arguments_class, method

#: The file of the method: options, functions, record.
FILE = """
from typing import Literal

import jax.numpy as jnp
from ed_infra.outputs import Metric
from ed_trainers import Loss, Method, MethodEntry, Role, TrainingArguments
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import target_logps


class CriticArguments(TrainingArguments):
    trainer_type: Literal["critic_sft"] = "critic_sft"
    strength: float = 0.5


def prepare(run, batch):
    return next_token_batch(batch, run.learner)


def loss(run, models, batch, key):
    chunk = {"placement": run.placement, "chunk": None}
    output, logps = target_logps(models.learner, batch, key, **chunk)
    _, critic = target_logps(models["critic"], batch, None, **chunk)
    weights = batch["weights"]
    far = jnp.sum(weights * jnp.square(logps - critic))
    count = jnp.sum(weights)
    total = jnp.sum(-weights * logps) + run.arguments.strength * far
    return Loss.of(output, total, count, distance=Metric.of(far, count))


CRITIC_SFT = MethodEntry(
    CriticArguments,
    Method(prepare=prepare, loss=loss, progress_columns=("loss", "distance")),
    roles=(Role("critic", required=True),),
)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with the method `critic_sft`, found by its metadata."""
    (tmp_path / "critic_package.py").write_text(FILE)
    info = tmp_path / "critic_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: critic-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[easydel.methods]\ncritic_sft = critic_package:CRITIC_SFT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for cached in (arguments._points, arguments._load_entry_point, trainer_class):
        cached.cache_clear()
    yield tmp_path
    for cached in (arguments._points, arguments._load_entry_point, trainer_class):
        cached.cache_clear()


def options(directory, **given):
    return arguments_class("critic_sft")(
        save_directory=str(directory),
        total_batch_size=8,
        max_training_steps=3,
        learning_rate=0.02,
        log_steps=1,
        use_tensorboard=False,
        progress_bar_type="none",
        do_last_save=False,
        **given,
    )


def test_entry_point_method_trains_with_its_own_role(toy, installed, tmp_path):
    assert "critic_sft" in METHODS and next(iter(METHODS)) == "sft"
    assert method("critic_sft").needs == ("critic",)
    make = trainer_class("critic_sft")
    critic = toy.model(seed=5)
    before = [np.array(leaf) for leaf in jax.tree.leaves(critic.split_module()[1])]
    run = make(options(tmp_path), toy.model(), toy.loader(), frozen={"critic": critic})
    output = run.train()
    assert output.metrics["steps"] == 3 and output.metrics["train_distance"] > 0
    after = jax.tree.leaves(critic.split_module()[1])
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
    near = make(
        options(tmp_path / "near", strength=50.0),
        toy.model(),
        toy.loader(),
        frozen={"critic": critic},
    ).train()
    assert near.metrics["train_distance"] < output.metrics["train_distance"]


def test_method_without_its_role_raises_config_error(toy, installed, tmp_path):
    make = trainer_class("critic_sft")
    with pytest.raises(ConfigError, match="reads the frozen model 'critic'"):
        make(options(tmp_path), toy.model())
    with pytest.raises(ConfigError, match="'critik'; did you mean 'critic'"):
        make(options(tmp_path), toy.model(), frozen={"critik": toy.model()})


def test_unknown_option_and_method_suggest_installed_names(installed, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'critic_sft'"):
        trainer_class("critic_sf")
    with pytest.raises(ValueError, match="did you mean 'strength'"):
        options(tmp_path, strenght=1.0)


def test_entry_point_without_method_entry_raises_config_error(installed):
    (installed / "critic_package.py").write_text("CRITIC_SFT = 3\n")
    sys.modules.pop("critic_package", None)
    with pytest.raises(ConfigError, match="is a int: name a MethodEntry"):
        method("critic_sft")


@pytest.mark.nightly
def test_shipped_options_are_read_without_jax_beside_installed_methods(installed):
    code = """
    import sys
    from ed_trainers.arguments import ARGUMENTS, METHODS
    assert "critic_sft" in list(METHODS)
    ARGUMENTS["grpo"](learning_rate=1e-6)
    assert "jax" not in sys.modules
    """
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(installed)!r})\n" + textwrap.dedent(code),
        ],
        check=True,
    )


def test_arguments_of_other_methods_are_rejected(toy, tmp_path):
    run = trainer_class("sft")
    given = arguments_class("sft")(save_directory=str(tmp_path))
    with pytest.raises(ConfigError, match="does not sample completions: omit rollout"):
        run(given, toy.model(), rollout=object())
    with pytest.raises(ConfigError, match="reads no rewards"):
        run(given, toy.model(), reward_functions=[len])
