"""Monitoring: norms of gradients, distributions of weights, and watchers of parameters."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers import LogWatcher, SFTTrainer
from ed_trainers.arguments import SFTArguments, idle_options
from ed_trainers.figures.metrics import curves, histograms, read_metrics
from ed_trainers.figures.trackers import About, WandB
from ed_trainers.optimizers import get_array_norms
from ed_trainers.probes import WatcherProbe, build_probes
from ed_trainers.report import charts
from flax import nnx
from test_trainers_loop import SETTINGS, StopAt, exact, trainer

STACK = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def params():
    layers = {"run_0_2_1": [{"mlp": {"kernel": jnp.asarray(STACK)}}]}
    return {"layers": layers, "norm": jnp.asarray([3.0, 4.0])}


def test_each_layer_has_the_norm_of_its_gradient():
    norms = {name: float(x) for name, x in get_array_norms(params()).items()}
    assert norms == pytest.approx(
        {
            "grad_norm/layers.0.mlp.kernel": np.linalg.norm(STACK[0]),
            "grad_norm/layers.1.mlp.kernel": np.linalg.norm(STACK[1]),
            "grad_norm/norm": 5.0,
        }
    )


def test_weight_distributions_are_those_of_numpy():
    given = {"weight_distribution_log_steps": 5, "weight_distribution_pattern": "layers.1"}
    (probe,) = build_probes(SFTArguments(**given), None, None, None, None)
    assert probe.every == 5
    row, lines = probe.look(SimpleNamespace(params=params()))
    assert lines == []
    name, values = "weights/layers.1.mlp.kernel", STACK[1]
    histogram = row.pop(f"{name}/histogram")
    expected = {"mean": values.mean(), "std": values.std(), "min": 12.0, "max": 23.0}
    assert row == pytest.approx({f"{name}/{key}": value for key, value in expected.items()})
    counts, edges = np.histogram(values, 64)
    np.testing.assert_array_equal(histogram["counts"], counts)
    np.testing.assert_allclose(histogram["edges"], edges, rtol=1e-6)


def test_rows_of_parameters_keep_their_names_and_have_no_chart():
    row = {"step": 5, "weights/a/mean": 0.5, "weights/a/h": {"counts": [1.0], "edges": [0.0, 1.0]}}
    assert curves(row) == {"weights/a/mean": 0.5}
    assert histograms(row) == {"weights/a/h": ([1.0], [0.0, 1.0])}
    assert curves({"step": 1, "loss": 2.0, "grad_norm/a": 1.0}) == {
        "train/loss": 2.0,
        "train/grad_norm/a": 1.0,
    }
    rows = [row, {"step": 1, "loss": 2.0, "grad_norm": 1.0, "grad_norm/a": 1.0}]
    assert [chart["name"] for chart in charts(rows)] == ["loss", "grad_norm"]


def test_wandb_shows_histograms_and_previews(tmp_path, monkeypatch):
    logged = []
    log = lambda values, step: logged.append((values, step))  # noqa: E731
    wandb = SimpleNamespace(
        init=lambda **options: SimpleNamespace(log=log),
        Histogram=lambda np_histogram: ("histogram", np_histogram),
        Table=lambda columns, data: ("table", columns, data),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    samples = [{"prompt": "a", "completion": "b"}]
    for shown in (True, False):
        tracker = WandB(tmp_path, About("p", "n", {}, shows_samples=shown))
        tracker.restart([])
        logged.clear()
        tracker.write({"step": 2, "w/h": {"counts": [1.0], "edges": [0.0, 1.0]}, "w/a": 0.5})
        tracker.write({"step": 3, "samples": samples})
        table = [({"samples": ("table", ["prompt", "completion"], [["a", "b"]])}, 3)]
        assert logged == [
            ({"w/a": 0.5}, 2),
            ({"w/h": ("histogram", ([1.0], [0.0, 1.0]))}, 2),
            ({}, 3),
            *(table if shown else []),
        ]


def test_watchers_name_their_mistakes():
    weights = SimpleNamespace(params={"kernel": jnp.ones(3)})
    for fn in (lambda x: 3.0, lambda x: {"a": "text"}, lambda x: {"a": ([1.0], [0.0])}):
        with pytest.raises(ConfigError, match="must return a mapping of numbers"):
            WatcherProbe(LogWatcher("mine", fn)).look(weights)
    with pytest.raises(ConfigError, match=r"'krnel' matches no parameter.*'kernel'"):
        WatcherProbe(LogWatcher("mine", lambda x: {}, pattern="krnel")).look(weights)
    for wrong in ({"interval": 0}, {"interval": True}, {"name": ""}):
        with pytest.raises(ConfigError, match="watcher"):
            LogWatcher(**{"name": "mine", "fn": lambda x: {}, **wrong})
    with pytest.raises(ConfigError, match="is not a pattern"):
        WatcherProbe(LogWatcher("mine", lambda x: {}, pattern="("))
    idle = idle_options(SFTArguments(weight_distribution_pattern="a"))
    assert [name for name, _ in idle] == ["weight_distribution_pattern"]


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(1, 1, 1, 1, 1), (1, 8, 1, 1, 1)], ids=str)
def test_norms_join_to_the_norm_of_the_step_and_change_no_bit(toy, tmp_path, dims):
    plain = trainer(toy, tmp_path / "plain", dims=dims)
    plain.train()
    logged = trainer(toy, tmp_path / "logged", dims=dims, log_grad_norms=True)
    logged.train()
    rows = [row for row in exact(tmp_path / "logged") if "loss" in row]
    for row in rows:
        norms = [value for name, value in row.items() if name.startswith("grad_norm/")]
        assert len(norms) == 4
        assert np.linalg.norm(norms) == pytest.approx(row["grad_norm"], rel=1e-5)
    assert [
        {name: value for name, value in row.items() if not name.startswith("grad_norm/")}
        for row in exact(tmp_path / "logged")
    ] == exact(tmp_path / "plain")
    for a, b in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (plain, logged)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_monitored_runs_resume_and_hold_the_weights_of_their_step(toy, tmp_path):
    def run(directory, *callbacks):
        arguments = SFTArguments(
            **{**SETTINGS, "use_tensorboard": True},
            save_directory=str(directory),
            save_steps=4,
            log_grad_norms=True,
            weight_distribution_log_steps=4,
            weight_distribution_pattern="^(kernel|norm)$",
        )
        watchers = [LogWatcher("l2", lambda x: {"norm": jnp.linalg.norm(x)}, 3, "bias|kernel")]
        out = SFTTrainer(
            arguments,
            model=toy.model(),
            train_dataset=toy.loader(),
            watchers=watchers,
            callbacks=callbacks,
        )
        out.train()
        return out

    last = run(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    weights = [row for row in rows if "weights/kernel/mean" in row]
    assert [row["step"] for row in weights] == [4, 8, 12]
    kernel = np.asarray(last.model.kernel[...])
    assert weights[-1]["weights/kernel/std"] == pytest.approx(kernel.std(), rel=1e-5)
    assert sum(weights[-1]["weights/norm/histogram"]["counts"]) == 16
    watched = [row for row in rows if "l2/kernel/norm" in row]
    assert [row["step"] for row in watched] == [3, 6, 9, 12]
    assert watched[-1]["l2/kernel/norm"] == pytest.approx(np.linalg.norm(kernel), rel=1e-5)
    assert list((tmp_path / "whole" / "tensorboard").iterdir())
    run(tmp_path / "parts", StopAt(5, lambda t: t.stop("the test")))
    run(tmp_path / "parts")
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")
