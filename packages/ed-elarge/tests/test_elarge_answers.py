"""Answers compared with the expected answers of a file, before and after training."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from ed_data import DataError
from ed_elarge.actions import execution
from ed_elarge.actions.summary import Summary
from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.answers import AnswerTask, average_scores, score_object
from run_files import run, small, with_texts

EXPECTED = '{"event": "lunch", "place": null}'
#: Answer -> (`exact_match`, `fields`, `valid_json`).
SCORED = {
    EXPECTED: (1, 1, 1),
    '{"place":null,"event":"lunch"}\n': (1, 1, 1),
    '{"event": "lunch", "place": null, "day": "Monday"}': (0, 1, 1),
    '{"event": "lunch"}': (0, 0.5, 1),
    '{"event": "Lunch", "place": "null"}': (0, 0, 1),
    f"Here it is:\n```json\n{EXPECTED}\n```": (0, 1, 0),
    f"{EXPECTED} and more": (0, 1, 0),
    '{"event": "lunch", ': (0, 0, 0),
    "[1]": (0, 0, 0),
    "lunch": (0, 0, 0),
    "": (0, 0, 0),
    "[" * 100_000: (0, 0, 0),
    '{"a":' * 100_000: (0, 0, 0),
}


class FixedAnswers:
    """A model with one answer to each prompt."""

    def __init__(self, *answers: str) -> None:
        self.answers = answers
        self.prompts: list[Any] = []

    def check_generates(self, kind: str) -> None:
        assert kind == "answers"

    def complete(self, prompts: list[Any], most_tokens: int) -> list[str]:
        self.prompts += prompts
        return list(self.answers[: len(prompts)])


def save_chats(folder: Path, *answers: str, **changes: Any) -> dict[str, Any]:
    """Write chats, and return a task that reads them."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": answer},
            ]
        }
        for number, answer in enumerate(answers)
    ]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "answers", "data_files": str(file), **changes}


@pytest.mark.parametrize("answer", SCORED, ids=lambda answer: answer[:40])
def test_json_answer_has_scores_of_its_object(answer: str) -> None:
    scores = score_object(answer, EXPECTED)
    assert tuple(scores.values()) == SCORED[answer]
    assert list(scores) == ["exact_match", "fields", "valid_json"]


def test_standard_error_is_that_of_a_mean() -> None:
    scores = [1.0, 0.0, 0.5, 1.0]
    averages = average_scores("fields", scores)
    assert averages["fields"] == 0.625
    assert averages["fields_stderr"] == pytest.approx(statistics.stdev(scores) / math.sqrt(4))
    assert average_scores("fields", [1.0]) == {"fields": 1.0}


def test_answers_are_compared_in_the_order_of_the_rows(tmp_path: Path) -> None:
    task = AnswerTask(LocalTask(**save_chats(tmp_path, "yes", "no", "yes")), 2)
    model: Any = FixedAnswers(" yes\n", "yes")
    assert task.evaluate(model)["exact_match"] == 0.5
    assert [sample["answer"] for sample in task.samples] == [" yes\n", "yes"]
    assert [prompt[0]["content"] for prompt in model.prompts] == ["question 0", "question 1"]
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    pairs = AnswerTask(LocalTask(type="answers", data_files=(str(file),)), None)
    model = FixedAnswers("2")
    assert pairs.evaluate(model) == {"exact_match": 1.0}


@pytest.mark.parametrize(
    ("row", "compare", "message"),
    [
        ({"messages": "a"}, "text", "messages must be a list of messages, got 'a'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "text", "must end with the expected"),
        (
            {"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]},
            "text",
            r"messages\[0\]: the field 'content' is missing",
        ),
        ({"prompt": "a", "completio": "b"}, "text", "did you mean 'completio'"),
        ({"prompt": "a", "completion": "b"}, "json", "must be a JSON object with a key, got 'b'"),
        ({"prompt": "a", "completion": "{}"}, "json", "must be a JSON object with a key, got '{}'"),
    ],
)
def test_broken_row_of_answers_is_reported_with_its_place(
    row: dict[str, Any], compare: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl:1.*{message}"):
        AnswerTask(LocalTask(type="answers", data_files=(str(file),), compare=compare), None)


def test_keys_of_answers_are_errors_for_other_tasks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare, show: a sts task reads only data_files"):
        LocalTask(type="sts", data_files=("a",), compare="json", show=1)
    with pytest.raises(ValueError, match="k: a answers task reads only data_files, compare"):
        LocalTask(**save_chats(tmp_path, "a", k=3))


def test_actions_before_train_know_that_training_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(execution, "_prepare", lambda elm: None)
    for name in ("train", "evaluate", "generate"):

        def record(session: execution.Session, options: object, name: str = name) -> None:
            seen.append((name, session.trains_later))

        monkeypatch.setattr(execution, f"{name}_session", record)
    assert run(small(with_texts(tmp_path), actions=["eval", "train", "generate", "eval"])) == 0
    assert seen == [("evaluate", True), ("train", False), ("generate", False), ("evaluate", False)]


def test_summary_shows_values_and_answers_before_and_after_training() -> None:
    summary = Summary()
    chat = ({"role": "user", "content": "Lunch [on] Monday?"},)
    for early, value, text in ((True, 0.25, "Sure!"), (False, 0.75, EXPECTED)):
        metrics = {"exact_match,none": value, "exact_match_stderr,none": 0.05}
        results = {"evaluator": "ed-elarge", "results": {"lunches": metrics}}
        summary.record_evaluation(results, None, trains_later=early)
        summary.record_sample(chat, text, expected=EXPECTED, trains_later=early)
    assert summary._rows() == [
        ("lunches", "", "on local rows"),
        ("  exact_match", "0.7500 ± 0.0500", "before training 0.2500 ± 0.0500"),
    ]
    values = summary.to_dict()
    assert values["samples"] == [
        {"prompt": chat, "completion": EXPECTED, "before": "Sure!", "expected": EXPECTED}
    ]
    assert values["evaluation"]["lunches"]["exact_match"] == 0.75
    assert values["evaluation_before_training"]["lunches"]["exact_match"] == 0.25
    cells = [list(column.cells) for column in summary._compare_answers().columns]
    assert cells == [[r"Lunch \[on] Monday?"], ["Sure!"], [EXPECTED], [EXPECTED]]


@pytest.mark.nightly
def test_run_evaluates_answers_before_and_after_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"{a} {b} {b} {a}."} for a in "abcdefgh" for b in "stuvwxyz"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": row["text"][:5], "completion": row["text"][5:]} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    task = {
        "type": "answers",
        "data_files": str(tmp_path / "pairs.jsonl"),
        "max_new_tokens": 4,
        "show": 2,
    }
    settings = small(tmp_path, actions=["eval", "train", "eval"])
    del settings["mixture"]["eval_fraction"]
    settings["trainer"] |= {"max_training_steps": 60, "learning_rate": 1e-2}
    settings["eval"] = {"local_tasks": [task], "use_tqdm": False}
    assert run(settings) == 0
    shown = capsys.readouterr().out
    assert "answers before training: exact_match 0.0000" in shown
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    before = summary["evaluation_before_training"]["answers"]["exact_match"]
    after = summary["evaluation"]["answers"]
    assert before == 0 < after["exact_match"] - 2 * after["exact_match_stderr"]
    assert [set(s) for s in summary["samples"]] == [
        {"prompt", "completion", "before", "expected"}
    ] * 2
    early = json.loads((tmp_path / "run/eval/results_before_training.json").read_text())
    later = json.loads((tmp_path / "run/eval/results.json").read_text())
    for results in (early, later):
        assert len(results["samples"]["answers"]) == len(pairs)
    assert "before training" in (tmp_path / "run/report.html").read_text()
