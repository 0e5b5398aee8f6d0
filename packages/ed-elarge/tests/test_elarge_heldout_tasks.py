"""Tasks that are built from held-out texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ed_elarge import eLargeModel, heldout_tasks
from ed_elarge.config.action_options import EvalOptions
from ed_elarge.evaluation import harness
from ed_infra.errors import ConfigError
from ed_infra.testing import english_topics

TEXTS = list(english_topics().values())[::10]


def test_questions_are_right_and_the_same_every_time() -> None:
    questions = heldout_tasks.list_questions(TEXTS)
    assert questions == heldout_tasks.list_questions(list(TEXTS))
    assert 50 <= len(questions) <= heldout_tasks.MAX_QUESTIONS
    whole = "\n\n".join(TEXTS)
    for question in questions:
        choices = question["choices"]
        assert len(set(choices)) == heldout_tasks.CHOICES
        right = [c for c in choices if question["context"] + c in whole]
        assert right == [choices[question["label"]]]


def test_cloze_labels_are_balanced_and_independent_of_length() -> None:
    questions = heldout_tasks.list_questions(TEXTS)
    labels = [question["label"] for question in questions]
    assert {0, 1, 2, 3} == set(labels)
    longest = sum(
        max(range(4), key=lambda i: len(q["choices"][i].split())) == q["label"] for q in questions
    )
    assert longest / len(questions) < 0.5


def test_too_little_held_out_text_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hold out more"):
        heldout_tasks.write_tasks(["Too short."], tmp_path)
    with pytest.raises(ConfigError, match="contains no text"):
        heldout_tasks.write_tasks(["  "], tmp_path)
    # perplexity alone needs no questions
    heldout_tasks.write_tasks(["Too short."], tmp_path, [heldout_tasks.PERPLEXITY])
    assert json.loads((tmp_path / "heldout_perplexity.jsonl").read_text()) == {"text": "Too short."}


def test_an_evaluation_without_a_trainer_writes_nothing_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    elm = eLargeModel.from_pretrained("model")
    monkeypatch.setattr(elm, "held_out_texts", lambda: TEXTS)
    tasks = elm.prepare_eval(EvalOptions(tasks=(heldout_tasks.PERPLEXITY,)))
    assert heldout_tasks.PERPLEXITY in tasks.manager.all_tasks
    assert tasks.results is None
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    named = elm.prepare_eval(EvalOptions(tasks=(heldout_tasks.PERPLEXITY,), output_path="r.json"))
    assert named.results == Path("r.json")


def test_bits_per_byte_are_printed_in_place_of_perplexities() -> None:
    metrics = {"word_perplexity": 42555.0, "byte_perplexity": 5.9, "bits_per_byte": 2.6}
    assert harness.select_metrics(metrics) == {"bits_per_byte": 2.6}
    assert harness.select_metrics({"word_perplexity": 20.0}) == {"word_perplexity": 20.0}
    found = {"results": {"task": {f"{name},none": value for name, value in metrics.items()}}}
    assert harness.list_figures(found) == {"task": metrics}, "the files keep every metric"


def test_lm_eval_computes_local_task_scores(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    whole = "\n\n".join(TEXTS)

    class Oracle(LM):
        """A model that assigns one bit to each byte of the held-out text."""

        def loglikelihood(self, requests):
            scores = [0.0 if "".join(r.args) in whole else -50.0 for r in requests]
            return [(score, score == 0.0) for score in scores]

        def loglikelihood_rolling(self, requests):
            return [-0.6931471805599453 * len(r.args[0].encode()) for r in requests]

        def generate_until(self, requests):
            raise AssertionError("no task generates")

    heldout_tasks.write_tasks(TEXTS, tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = simple_evaluate(
        model=Oracle(),
        tasks=list(heldout_tasks.HELDOUT_TASKS),
        task_manager=manager,
        bootstrap_iters=0,
    )["results"]
    assert results["heldout_cloze"]["acc,none"] == 1.0
    assert results["heldout_perplexity"]["bits_per_byte,none"] == pytest.approx(1.0)
