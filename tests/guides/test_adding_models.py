"""Each step of docs/adding_models.md works: in a separate package, and in this repository."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.snippets.pages import blocks
from tools.new_model import Family, main, next_steps
from tools.workspace import ROOT

PAGE = ROOT / "docs/adding_models.md"
HERE = "tests/guides/test_adding_models.py follows this page"


def commands() -> list[str]:
    """Return every line of the page's bash blocks, in order."""
    return [row for b in blocks(PAGE) if b.language == "bash" for row in b.body.splitlines()]


def edited(source: str) -> str:
    """Return the family after step 2: a new first line, and the classes that the blocks replace."""
    text = PAGE.read_text(encoding="utf-8")
    first = next(row for row in text.splitlines() if row.startswith("MyModel: "))
    source = re.sub(r'^"""[^\n]*', f'"""{first}', source)
    for block in (b for b in blocks(PAGE) if b.body.startswith("from ed_layers")):
        source = source.replace("import transformers\n", f"import transformers\n{block.body}\n", 1)
    for block in (b for b in blocks(PAGE) if b.language == "python" and "class " in b.body):
        name = re.search(r"^class (\w+)\(", block.body, re.MULTILINE)
        assert name is not None
        old = rf"(?:^@[^\n]*\n)?^class {name[1]}\(.*?(?=^(?:@|class )|\Z)"
        source, count = re.subn(
            old, lambda _, b=block: b.body + "\n\n", source, flags=re.MULTILINE | re.DOTALL
        )
        assert count == 1, name[1]
    return source


def run(command: str, folder: Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run a command of the page in this environment; `path` precedes all installed packages."""
    words = re.sub(r"^uv run (--no-sync )?", "", command).split()
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    if words[0] in ("pytest", "elarge"):
        words = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, *python_path()]))}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def python_path() -> list[str]:
    """Return the entries that this process adds to Python's path."""
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def install(folder: Path, source: Path) -> Path:
    """Simulate an installation without an index: write metadata with the entry points."""
    import tomllib

    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"{k} = {v}" for k, v in project["entry-points"]["easydel.models"].items()]
    (metadata / "entry_points.txt").write_text("[easydel.models]\n" + "\n".join(lines) + "\n")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    return folder


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Execute steps 1 to 3; return the package's folder and the path after installation."""
    home = tmp_path_factory.mktemp("home")
    folder, clone = home / "my-models", home / "clone"
    clone.mkdir()
    (command,) = [c for c in commands() if "--package" in c]
    run(command, clone, [ROOT])
    file = folder / "src/my_models/my_model.py"
    file.write_text(edited(file.read_text()))
    tests = folder / "tests/test_my_model.py"
    (cases,) = [b.body for b in blocks(PAGE) if b.body.startswith("CASES")]
    old = re.compile(r"^CASES = .*?^\)$", re.MULTILINE | re.DOTALL)
    text, count = old.subn(lambda _: cases.strip(), tests.read_text())
    assert count == 1
    tests.write_text(text)
    return folder, [folder / "src", install(home / "site", folder)]


def test_adding_models_page_has_only_followed_blocks() -> None:
    found = blocks(PAGE)
    assert found and all(b.skip == HERE for b in found)


def test_new_model_command_prints_commands_of_the_page() -> None:
    family = Family("my_model", "llama", known=False, stem="My")
    printed = next_steps(family, Path("../my-models"))
    for command in [c for c in commands() if "../my-models" in c and "new_model" not in c]:
        assert f"  {command} " in printed


@pytest.mark.nightly
def test_external_model_package_passes_its_tests(mine: tuple[Path, list[Path]]) -> None:
    folder, path = mine
    stated = re.search(r"```text\n(\[project\.entry.*?)```", PAGE.read_text(), re.DOTALL)
    assert stated is not None and stated[1] in (folder / "pyproject.toml").read_text()
    (command,) = [c for c in commands() if "pytest ../my-models" in c]
    done = run(f"{command} -q -k cache", folder.parent / "clone", path)
    assert "2 passed" in done.stdout


@pytest.mark.nightly
def test_new_model_passes_conformance_suite(mine: tuple[Path, list[Path]]) -> None:
    folder, path = mine
    (command,) = [c for c in commands() if "pytest ../my-models" in c]
    done = run(f"{command} -q", folder.parent / "clone", path)
    assert re.search(r"\d+ passed, 8 skipped", done.stdout), done.stdout[-500:]


@pytest.mark.nightly
def test_external_model_trains_from_yaml_and_is_served(
    mine: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    import httpx

    _, path = mine
    (block,) = [b for b in blocks(PAGE) if b.language == "yaml"]
    (tmp_path / "run.yaml").write_text(block.body)
    (command,) = [c for c in commands() if "elarge" in c]
    assert "loss" in run(command, tmp_path, path).stdout
    (program,) = [b for b in blocks(PAGE) if b.language == "python" and "Auto" in b.body]
    (tmp_path / "program.py").write_text(program.body)
    assert "MyForCausalLM 1.0" in run("python program.py", tmp_path, path).stdout

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "serve.yaml").write_text(
        "model: {name_or_path: runs/mine/model}\n"
        "esurge: {max_model_len: 64, page_size: 16, max_num_seqs: 2, compile_runner: false}\n"
        f"actions: [{{serve: {{port: {port}, served_model_name: mine}}}}]\n"
    )
    elarge = Path(sys.executable).with_name("elarge")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, *python_path()]))}
    process = subprocess.Popen([elarge, "serve.yaml"], cwd=tmp_path, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        body = {"model": "mine", "prompt": "The", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=120).json()
        assert answer["usage"]["completion_tokens"] > 0, answer
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.nightly
def test_new_family_in_repository_passes_cache_check(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for part in ("tools", "docs", "tests/conformance", "packages/ed-models"):
        ignored = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / part, clone / part, ignore=ignored)
    for other in (ROOT / "packages").iterdir():
        if other.name != "ed-models":
            (clone / "packages" / other.name).symlink_to(other)
    made, _sync, measured, table = commands()[-4:]
    source = clone / "packages/ed-models"
    path = [clone, source / "src"]
    run(made, clone, path)
    family = source / "src/ed_models/families/my_model.py"
    family.write_text(edited(family.read_text()))
    path.append(install(tmp_path / "site", source))
    run(f"{measured} --checks cache", clone, path)
    run(table, clone, path)
    assert "| `my_model` | MyModel: Llama with normed" in (clone / "docs/models.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My-Model"], "is not a valid family name"),
        (["class"], "is not a valid family name"),
        (["llama"], "exists already"),
        (["my_model", "--like", "lama"], "no family 'lama' to copy; did you mean 'llama'"),
        (["my_model", "--package", "{}/1st"], "is not a valid package name"),
        (["my_model", "--package", "{}"], "is not empty and has no pyproject.toml"),
    ],
)
def test_new_model_command_rejects_invalid_names(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert main([a.format(folder) for a in arguments]) == 2
    assert message in capsys.readouterr().err
    assert [f.name for f in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("like", ["llama", "gpt2", "mixtral", "falcon"])
def test_new_model_can_copy_any_family(like: str, tmp_path: Path) -> None:
    assert main(["brand_new", "--like", like, "--package", str(tmp_path / "pack")]) == 0
    text = (tmp_path / "pack/src/pack/brand_new.py").read_text()
    compile(text, "brand_new.py", "exec")
    assert 'model_type = "brand_new"' in text and f'"{like}"' not in text
    assert main(["second", "--like", like, "--package", str(tmp_path / "pack")]) == 0
    lines = (tmp_path / "pack/pyproject.toml").read_text().splitlines()
    assert {'brand_new = "pack.brand_new"', 'second = "pack.second"'} <= {*lines}
