"""Rollouts and benchmarks of a run share one engine and its cache pages."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ed_elarge.engine.lending
import pytest
from ed_elarge.engine.lending import LentEngine
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import EngineConfig
from ed_infra.errors import ConfigError
from run_files import run, small


class Made:
    """Arguments of an engine."""

    max_model_len = 64

    def __init__(
        self, model: object, tokenizer: object, config: EngineConfig, records: object = None
    ):
        self.config, self.commands = config, []

    def together(self) -> nullcontext[None]:
        return nullcontext()

    def execute(self, command: object) -> None:
        self.commands.append(type(command).__name__)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ed_elarge.engine.lending, "eSurge", Made)


def test_lent_engine_options_depend_on_benchmarks(engines: None) -> None:
    def options(config: EngineConfig | None = None, **given: Any) -> tuple[int, bool, bool]:
        made = LentEngine.of(object(), None, config or EngineConfig(), **given)  # type: ignore[arg-type]
        assert made.engine.commands == ["DropWeights"]  # type: ignore[attr-defined]
        own = made.engine.config
        return own.max_model_len, own.compile_runner, own.silent_mode

    assert options(length=32) == (32, False, True)
    assert options(length=32, benchmarks=True) == (8192, False, True)
    assert options(benchmarks=True) == (8192, True, False)
    set_by_hand = EngineConfig(max_model_len=50, compile_runner=True)
    assert options(set_by_hand, length=32, benchmarks=True) == (50, True, True)
    seqs = [
        LentEngine.of(object(), None, config, length=8, completions=12).engine.config.max_num_seqs  # type: ignore[arg-type]
        for config in (EngineConfig(), EngineConfig(max_num_seqs=64))
    ]
    assert seqs == [12, 64]  # an option that is set stays
    with pytest.raises(ConfigError, match="need up to 65 tokens"):
        options(length=65, benchmarks=True)


@pytest.mark.nightly
def test_completions_and_benchmarks_by_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same weights the same completions come as in a run without benchmarks."""
    pytest.importorskip("lm_eval")
    rows = [{"prompt": f"What follows on {i}? And then, what follows on that?"} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, plain = [], LentEngine.of

    def counted(*given: Any, **more: Any) -> LentEngine:
        made.append(plain(*given, **more))
        return made[-1]

    monkeypatch.setattr(LentEngine, "of", counted)

    def rows_of(name: str, **trainer: Any) -> list[dict[str, Any]]:
        settings = small(tmp_path, actions=["train"])
        data = {"data_files": str(tmp_path / "prompts.jsonl"), "content_field": "prompt"}
        settings["mixture"] = {"informs": [data], "eval_fraction": 0.2}
        settings["trainer"] |= {
            "trainer_type": "grpo",
            "reward_functions": [{"regex": {"pattern": "[0-9]"}}],
            "num_return_sequences": 2,
            "max_prompt_length": 12,
            "max_completion_length": 4,
            "log_steps": 1,
            "save_directory": str(tmp_path / name),
            **trainer,
        }
        assert run(settings) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    without = rows_of("without")
    assert len(made) == 1
    looks = {"benchmark_interval": 1, "benchmarks": ["heldout_perplexity"]}
    both = rows_of("both", **looks)
    assert len(made) == 2, "one engine for each of the two runs"
    name = "benchmark/heldout_perplexity/bits_per_byte"
    assert [row["step"] for row in both if name in row] == [1, 2, 3]
    for own, other in zip(*([r for r in of if "loss" in r] for of in (both, without)), strict=True):
        for figure in ("loss", "reward", "completions/mean_length", "grad_norm"):
            assert own[figure] == other[figure], figure


def test_a_rollout_takes_an_engine_or_one_that_is_shared(engines: None) -> None:
    lent = LentEngine.of(object(), None, EngineConfig(), length=8)  # type: ignore[arg-type]
    assert EngineRollout(lent).engine is EngineRollout(lent.engine).engine is lent.engine
