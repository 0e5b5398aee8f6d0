"""`elarge data FILE`: the report in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ed_elarge.command.main import app
from run_files import with_changes
from typer.testing import CliRunner


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [{"content": f"text {i} of " + "sheep " * (i % 20)} for i in range(60)]
    rows += [{"content": None}, rows[3]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = with_changes(
        mixture__informs=[{"data_files": str(tmp_path / "rows.jsonl")}],
        mixture__cache_dir=str(tmp_path / "cache"),
        mixture__eval_fraction=...,
        trainer__save_directory=str(tmp_path / "run"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(changes))
    return path


def test_the_report_of_a_run_file(run_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["data", str(run_file), "--output", str(page), "--near"])
    assert done.exit_code == 0, done.output
    assert "61" in done.output and "length of the documents" in done.output
    assert "'content' is null" in done.output
    assert "row 0, as the trainer sees it" in done.output
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_is_written_in_the_directory_of_the_trainer(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert CliRunner().invoke(app, ["data", str(run_file)]).exit_code == 0
    assert (tmp_path / "run" / "data.html").is_file()

    settings = yaml.safe_load(run_file.read_text())
    settings["model"]["tokenizer"] = str(tmp_path / "run" / "tokenizer")
    settings["mixture"]["batch_size"] = 4
    del settings["trainer"], settings["actions"]
    run_file.write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(app, ["data", str(run_file)])
    assert done.exit_code == 0 and "length of the documents" in done.output, done.output
    assert "wrote" not in done.output
    assert not list((tmp_path / "here").iterdir())


def test_invalid_data_command_exits_with_error(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"content": ')
    done = CliRunner().invoke(app, ["data", str(run_file)])
    assert done.exit_code == 2
    assert "rows.jsonl:1: not JSON" in done.stderr
    (tmp_path / "empty.yaml").write_text("trainer: {trainer_type: sft}\n")
    done = CliRunner().invoke(app, ["data", str(tmp_path / "empty.yaml")])
    assert done.exit_code == 2
    assert "the section 'mixture' is missing" in done.stderr
