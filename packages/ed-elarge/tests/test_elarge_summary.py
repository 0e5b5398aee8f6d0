"""The summary of a run shows the metrics of the method, and no others."""

from __future__ import annotations

from ed_elarge.actions.summary import Summary


def test_the_summary_shows_the_progress_figures_of_the_method_and_the_perplexity() -> None:
    summary = Summary()
    summary.metrics = {
        "steps": 20.0,
        "train_reward": 0.75,
        "train_kl": 0.01,
        "train_loss": 0.0,
        "eval_loss": 0.0,
        "eval_reward": 0.5,
        "eval_kl": 0.02,
        "eval_perplexity": 3.0,
        "eval_clip_ratio/low_mean": 0.0,
        "eval_clip_ratio/region_mean": 0.0,
        "goodput": 0.9,
    }
    assert [row[:2] for row in summary._rows()] == [
        ("steps", "20"),
        ("training reward", "0.7500"),
        ("training kl", "0.0100"),
        ("training loss", "0.0000"),
        ("held-out reward", "0.5000"),
        ("held-out kl", "0.0200"),
        ("held-out loss", "0.0000"),
        ("held-out perplexity", "3.0000"),
    ]
