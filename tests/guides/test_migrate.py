"""The pages about other programs: their tables are complete, and their examples run."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.command.runs import run_file
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.other_files import place
from ed_elarge.errors import InputError
from ed_trainers.arguments import ARGUMENTS

from tests.snippets.pages import blocks
from tools import migration_tables
from tools.workspace import ROOT

#: The pages about training; the others are about requests and flags of servers.
SERVERS = {ROOT / f"docs/migrate/{name}.md" for name in ("vllm", "llama_cpp", "ollama")}
PAGES = sorted(set((ROOT / "docs/migrate").glob("*.md")) - SERVERS)
#: Page -> the classes of TRL whose names it lists, and the method with the same options.
TRL_METHODS = {
    "SFTConfig": "sft",
    "RewardConfig": "reward",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "DistillationConfig": "distillation",
}


def before(page: str) -> dict[str, Any]:
    """Return the file of the other program that a page shows."""
    text = (ROOT / f"docs/migrate/{page}.md").read_text("utf-8")
    (block,) = re.findall(r"^```yml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block)


def after(page: str) -> str:
    """Return the run file that a page shows; with two run files, the second one."""
    found = blocks(ROOT / f"docs/migrate/{page}.md")
    return [block.body for block in found if block.language == "yaml"][-1]


@pytest.mark.parametrize("path", migration_tables.PAGES, ids=lambda path: path.stem)
def test_migration_page_is_up_to_date(path: Path) -> None:
    written = path.read_text("utf-8")
    assert written == migration_tables.page(path), "run: uv run python -m tools.migration_tables"


def test_run_file_with_names_of_easydel_equals_the_file_with_names_of_this_project() -> None:
    found = blocks(ROOT / "docs/migrate/easydel.md")
    first, second = (block.body for block in found if block.language == "yaml")
    assert first != second
    one, other = (normalize(nodes.parse_yaml(text, "run.yaml")) for text in (first, second))
    assert one.sections == other.sections


@pytest.mark.parametrize("page", ["axolotl", "trl"])
def test_every_key_of_the_other_file_has_a_place_with_the_same_value(page: str) -> None:
    own = yaml.safe_load(after(page))
    table = migration_tables.PAGES[migration_tables.FOLDER / f"{page}.md"]()
    for key, value in before(page).items():
        where = place(key)
        assert f"| `{key}` |" in table or where == f"trainer.{key}", key
        assert where is not None
        here: Any = own
        for part in where.split(".") if re.fullmatch(r"[a-z_.]+", where) else ():
            here = here.get(part, here.get(key)) if isinstance(here, dict) else here
        if (
            re.fullmatch(r"[a-z_.]+", where)
            and "per_epoch" not in key
            and "max_length" not in where
        ):
            assert here == value, f"{key}: {where}"


@pytest.mark.parametrize("page", ["axolotl", "trl"])
def test_file_of_another_program_is_an_error_that_states_every_place(page: str) -> None:
    text = yaml.safe_dump(before(page))
    with pytest.raises(InputError) as error:
        normalize(nodes.parse_yaml(text, "theirs.yaml"))
    unknown = [p for p in error.value.problems if p.message.startswith("unknown section")]
    assert len(unknown) == len(before(page))
    assert all(re.search(r"; (use|omit it)", problem.message) for problem in unknown)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize(("config", "method"), TRL_METHODS.items())
def test_every_option_of_trl_is_an_option_or_has_a_place(config: str, method: str) -> None:
    trl = pytest.importorskip("trl")
    options = ARGUMENTS[method]
    names = {field.name for field in dataclasses.fields(getattr(trl, config))}
    unknown = {
        name
        for name in names
        if name not in options.model_fields
        and name not in options.ALIASES
        and name not in options.EQUIVALENT
        and not any(name in other.model_fields for other in ARGUMENTS.values())
    }
    assert not unknown


@pytest.mark.nightly
@pytest.mark.torch
def test_keys_of_the_trl_example_are_options_of_trl() -> None:
    trl = pytest.importorskip("trl")
    configs = (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments)
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    assert {*before("trl")} - {"warmup_ratio"} <= names


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_run_file_of_a_migration_page_trains(
    page: str, tmp_path: Path, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(quickstart_model, tmp_path / "runs/quickstart/model")
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(after(page))
    assert run_file("run.yaml") == 0
    (metrics,) = Path("runs").glob("*/metrics.jsonl")
    assert metrics.read_text().count("\n") >= 1
