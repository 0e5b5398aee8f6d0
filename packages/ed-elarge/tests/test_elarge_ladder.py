"""A ladder of small models predicts the loss of a larger one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_elarge import ladder
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.ladder.rungs import check_run, list_sizes, scale_run
from ed_elarge.ladder.scaling_law import (
    extrapolate_rate,
    find_minimum,
    fit_law,
    predict_loss,
)
from ed_elarge.ladder.trial import Trial
from ed_infra.errors import ConfigError
from run_files import with_changes

COMPUTE = [1e12, 1e13, 1e14, 1e15]
CONFIG = SimpleNamespace(
    model_type="llama",
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    intermediate_size=2048,
)


@pytest.mark.parametrize(("floor", "exponent"), [(1.7, 0.15), (0.0, 0.08), (2.5, 0.3)])
def test_law_without_noise_is_found_and_extrapolated(floor: float, exponent: float) -> None:
    losses = [floor + 3 * (c / 1e12) ** -exponent for c in COMPUTE]
    law = fit_law(COMPUTE, losses)
    truth = floor + 3 * 1e4**-exponent
    assert float(law.predict(1e16)) == pytest.approx(truth, rel=0.01)
    assert np.allclose(law.predict(np.array(COMPUTE)), losses, rtol=0.003)


def test_interval_contains_the_truth_of_noisy_laws_about_as_often_as_it_claims() -> None:
    random, inside = np.random.default_rng(5), 0
    clean = np.array([1.5 + 4 * (c / 1e12) ** -0.2 for c in COMPUTE])
    truth = 1.5 + 4 * 1e4**-0.2
    for seed in range(12):
        losses = clean * (1 + 0.01 * random.standard_normal(len(clean)))
        _, interval = predict_loss(COMPUTE, list(losses), 1e16, noise=0.01, seed=seed)
        assert interval.low <= interval.value <= interval.high
        inside += interval.low <= truth <= interval.high
    assert inside >= 9
    with pytest.raises(ConfigError, match="needs 3 rungs, got 2"):
        fit_law(COMPUTE[:2], [3.0, 2.0])


@pytest.mark.nightly
@pytest.mark.parametrize("rungs", [3, 4])
@pytest.mark.parametrize("curve", ["law", "bending", "sigmoid"])
def test_interval_contains_curves_that_follow_no_law(curve: str, rungs: int) -> None:
    """Losses of short runs fall faster than a law, until they approach one."""
    random, inside, compute = np.random.default_rng(1), 0, 1e10 * 9.0 ** np.arange(rungs + 1)
    log_compute = np.log(compute / compute[0])
    for seed in range(20):
        share = random.uniform(0, 1)
        if curve == "law":
            losses = 2 * share + 3 * np.exp(-(0.05 + 0.2 * share) * log_compute)
        elif curve == "bending":
            losses = 5.7 * np.exp(-0.04 * log_compute - 0.01 * share * log_compute**2)
        else:
            middle = (0.3 + 0.5 * share) * log_compute[-1]
            losses = 2.2 + 3.2 / (1 + np.exp((log_compute - middle) / 2))
        losses = losses * (1 + 0.005 * random.standard_normal(rungs + 1))
        known, flops = list(losses[:-1]), list(compute[:-1])
        _, interval = predict_loss(flops, known, float(compute[-1]), noise=0.005, seed=seed)
        assert interval.low <= interval.value <= interval.high
        assert interval.high - interval.low < 0.6 * interval.value
        inside += interval.low <= losses[-1] <= interval.high
    assert inside >= 16


def test_law_that_misses_the_largest_rung_has_a_wider_interval() -> None:
    clean = np.array([1.5 + 4 * (c / 1e12) ** -0.2 for c in COMPUTE])
    missed = clean * np.array([1.0, 1.0, 1.0, 0.97])
    widths = []
    for losses in (clean, missed):
        _, interval = predict_loss(COMPUTE, list(losses), 1e16, noise=0.001)
        widths.append(interval.high - interval.low)
    assert widths[1] > 3 * widths[0]


def test_best_rate_is_between_trials_and_falls_with_the_parameters() -> None:
    rates = [1e-3, 2e-3, 4e-3]
    losses = [3 + np.log(rate / 1.5e-3) ** 2 for rate in rates]
    assert find_minimum(rates, losses) == pytest.approx(1.5e-3, rel=1e-6)
    assert find_minimum(rates, [1.0, 2.0, 3.0]) == pytest.approx(1e-3)
    interval = extrapolate_rate([1e5, 1e6, 1e7], [4e-3, 2e-3, 1e-3], 1e8, step=2.0)
    assert interval.value == pytest.approx(5e-4, rel=1e-6)
    assert interval.high / interval.low == pytest.approx(2.0)
    same = extrapolate_rate([1e5, 1e6], [4e-3, 1e-3], 1e8, step=2.0, steepest=0.0)
    assert same.value == pytest.approx(2e-3)


def test_sizes_shrink_in_width_and_depth_and_keep_the_head() -> None:
    sizes = [size.fields for size in list_sizes(CONFIG, 4, 3.0)]
    assert sizes[-1] == {
        "num_attention_heads": 8,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1368,
    }
    assert len(sizes) == 4
    for fields in sizes:
        assert fields["hidden_size"] == 64 * fields["num_attention_heads"]
        assert fields["num_attention_heads"] % fields["num_key_value_heads"] == 0
    with pytest.raises(ConfigError, match="cannot be scaled"):
        list_sizes(SimpleNamespace(model_type="bert"), 4, 3.0)


def build_run(**changes: Any) -> tuple[dict[str, Any], Any]:
    values = with_changes(**{"trainer__max_training_steps": 100, **changes})
    return values, normalize(nodes.parse_yaml(json.dumps(values), "run.yaml"))


def test_steps_of_a_recipe_scale_with_a_rung() -> None:
    values, run = build_run(trainer__warmup_steps=10, trainer__save_steps=5)
    scaled = scale_run(
        values, run, fields={"hidden_size": 32}, share=0.3, changes={"learning_rate": 0.1}
    )
    assert scaled["model"]["config"]["hidden_size"] == 32
    assert scaled["trainer"]["warmup_steps"] == 3
    assert scaled["trainer"]["save_steps"] is None
    assert scaled["mixture"] == values["mixture"]


def test_run_that_smaller_models_do_not_predict_is_refused() -> None:
    check_run(build_run()[1])
    for changes, words in (
        ({"model": {"name_or_path": "some/model"}}, "trained weights"),
        ({"lora": {"rank": 2}}, "with adapters"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_run(build_run(**changes)[1])


def test_ladder_tunes_rates_within_its_budget_and_predicts_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trials are a formula: a law of the loss, and a best rate that falls with the size."""
    values, run = build_run(trainer__max_training_steps=1000, trainer__learning_rate=1e-3)
    values["model"]["tokenizer"] = "a-tokenizer"

    def count(run: Any, length: int) -> tuple[Any, int, float]:
        fields = {**vars(CONFIG), **run.model.config}
        size = fields["num_hidden_layers"] * fields["hidden_size"] ** 2 * 12
        return CONFIG, size, 6.0 * size

    def compute_loss(flops: float, parameters: float, rate: float) -> float:
        best = 3e-3 * (parameters / 1e6) ** -0.3
        return 2 + 3 * (flops / 1e14) ** -0.2 + 0.1 * np.log(rate / best) ** 2

    def train(run: Any, rung: Any) -> Trial:
        rate = run.trainer.learning_rate
        loss = compute_loss(rung.flops, rung.parameters, rate) + 1e-3 * (run.trainer.seed % 3)
        seconds = 1.0 + rung.flops / 1e15
        return Trial(rate, 8, run.trainer.seed, "eval_loss", loss, seconds, seconds - 1, rung.flops)

    monkeypatch.setattr(ladder, "count_model", count)
    monkeypatch.setattr(ladder, "train_trial", train)
    lines: list[str] = []
    climbing = ladder.Ladder(values, run, 1e9, 4, 3.0, lines.append)
    target, _ = climbing.plan()
    prediction = climbing.climb()
    assert [len(rung["trials"]) > 1 for rung in prediction["rungs"]] == [True, True, True, False]
    assert len(lines) == sum(len(rung["trials"]) for rung in prediction["rungs"])
    rate, loss = prediction["learning_rate"], prediction["loss"]
    best = 3e-3 * (target.parameters / 1e6) ** -0.3
    assert rate["low"] <= best <= rate["high"]
    assert loss["low"] <= compute_loss(target.flops, target.parameters, best) <= loss["high"]
    assert loss["high"] - loss["low"] < 0.3
    widths = {"hidden_size": 192, "num_attention_heads": 3}
    mup = {"model__parametrization": "mup", "model__base_widths": widths}
    values, run = build_run(trainer__max_training_steps=1000, **mup)
    values["model"]["tokenizer"] = "a-tokenizer"
    scaled = ladder.Ladder(values, run, 1e9, 4, 3.0, lines.append).climb()
    assert [len(rung["trials"]) > 1 for rung in scaled["rungs"]] == [True, True, False, False]
    rates = [rung["learning_rate"] for rung in scaled["rungs"]]
    assert rates[2] == pytest.approx(np.sqrt(rates[0] * rates[1]))
    assert scaled["learning_rate"]["method"] == "the same rate at all widths (µP)"
    with pytest.raises(ConfigError, match="raise --budget"):
        ladder.Ladder(values, run, 1.0, 4, 3.0, lines.append).climb()
