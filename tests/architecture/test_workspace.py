"""The workspace is consistent, its tools detect faults, and no tracked file names a machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from xdist.scheduler import LoadGroupScheduling

from tools import check_workspace, release
from tools.workspace import ROOT, packages

# In pieces, so that the patterns do not match this file.
HOSTS = re.compile("|".join(["pypi" + r"\.org", "python" + "hosted", "registry" + r"\.npmjs"]))
MACHINE_PATHS = re.compile(r"(^|[^A-Za-z0-9_.~-])/(work|root|" + r"tmp)/[A-Za-z0-9_.]")


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked text files, or skip the test outside a git checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: the tracked files are unknown")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and path.name != "uv.lock"]


#: Packages that tools only compare with. They are not in the lock, and pyright ignores them.
OPTIONAL = {
    "ctranslate2",
    "fastembed",
    "grain",
    "onnx",
    "onnxruntime",
    "openvino",
    "optimum",
    "sentence_transformers",
    "torch",
    "trl",
}


def test_tools_import_only_installed_or_optional_packages() -> None:
    missing = {
        f"{file.name}: {name}"
        for file in (ROOT / "tools").rglob("*.py")
        for name in imported(file) - OPTIONAL
        if find_spec(name) is None
    }
    assert not missing


def imported(file: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_workspace_metadata_is_consistent() -> None:
    assert check_workspace.problems() == []


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Copy the files that the check reads, so that a test can break them."""
    for name in ("pyproject.toml", "uv.lock", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in packages():
        here = tmp_path / "packages" / package.folder.name
        (here / "tests").mkdir(parents=True)
        (here / "tests" / "test_x.py").touch()
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
            shutil.copy(package.folder / name, here / name)
        for module in package.modules:
            (here / "src" / module).mkdir(parents=True)
            (here / "src" / module / "py.typed").touch()
    assert check_workspace.problems(tmp_path) == []
    return tmp_path


@pytest.mark.daily("*ceiling", "*differs from the one", "*uv.lock contains torch")
@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "complaint"),
    [
        ("packages/ed-infra/pyproject.toml", 'version = ".*"', 'version = "0.2.0"', "excludes"),
        ("packages/ed-infra/pyproject.toml", 'version = ".*"', 'version = "0.1.9"', "no entry"),
        (
            "packages/ed-infra/pyproject.toml",
            'version = ".*"',
            'version = "0.1.9"',
            "run `uv lock`",
        ),
        ("packages/ed-layers/pyproject.toml", "ed-infra>=0.1,<0.2", "ed-infra", "floor and a"),
        ("packages/ed-layers/pyproject.toml", "ed-infra>=0.1,<0.2", "ed-infra==0.1.0", "ceiling"),
        ("packages/ed-layers/pyproject.toml", 'jax>=[0-9.]*"', 'jax>=0.1"', "more than one way"),
        ("packages/ed-layers/pyproject.toml", ">=3.11", ">=3.12", "requires-python differs"),
        (
            "packages/ed-layers/pyproject.toml",
            "ed-infra = { workspace = true }",
            "",
            "must contain",
        ),
        ("packages/ed-layers/CHANGELOG.md", "## .*", "", "no entry for"),
        ("packages/ed-layers/LICENSE", "Apache", "Another", "differs from the one"),
        ("uv.lock", 'registry = "https://[^"]*" }', 'registry = "https://x.org" }', "the indexes"),
        ("uv.lock", '\nname = "numpy"', '\nname = "torch"', "uv.lock contains torch"),
    ],
)
def test_workspace_check_reports_injected_faults(
    workspace: Path, file: str, pattern: str, replacement: str, complaint: str
) -> None:
    path = workspace / file
    before = path.read_text(encoding="utf-8")
    after = re.sub(pattern, replacement, before, count=1)
    assert after != before
    path.write_text(after, encoding="utf-8")
    assert any(complaint in line for line in check_workspace.problems(workspace))


def test_release_tag_requires_package_version_and_changelog() -> None:
    package = packages()[0]
    assert release.package_of(f"{package.name}-v{package.version}").name == package.name
    for tag, complaint in [
        (f"{package.name}-v99.0.0", "does not match"),
        (f"{package.name}-99.0.0", "not a release tag"),
        ("ed-nothing-v0.1.0", "names no package"),
    ]:
        with pytest.raises(release.TagError, match=complaint):
            release.package_of(tag)


def test_only_publish_job_has_id_token_permission() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    holders = [n for n, job in workflow["jobs"].items() if "id-token" in job.get("permissions", {})]
    assert holders == ["publish"]
    assert set(workflow["jobs"]["publish"]["needs"]) == {"build", "verify"}


def test_every_pre_commit_hook_runs_a_locked_tool() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local"
    assert all(hook["entry"].startswith("uv run ") for hook in local["hooks"])


def test_pyright_checks_whole_folders_that_exist() -> None:
    """pyright reports no error for a pattern without files, so the folders are plain names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    assert settings["include"] == ["packages", "tools"]
    assert all((ROOT / folder).is_dir() for folder in settings["include"])
    excluded = ["packages/*/tests/**", "packages/*/hatch_build.py", "**/__pycache__"]
    assert settings["exclude"] == excluded


def test_tracked_files_name_no_registry_and_no_machine_path() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if HOSTS.search(line) or MACHINE_PATHS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found


def test_readme_contains_quickstart_and_test_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:pip install uv && )?uv run .*$", readme, flags=re.MULTILINE)
    assert "pip install uv && uv run elarge examples/quickstart.yaml" in commands
    assert "uv run pytest" in commands
    assert "uv run pytest" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_tests_of_a_file_have_one_group_in_xdist(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise both workers build the fixtures of a file, and the run takes longer by a third."""
    item = request.node
    monkeypatch.setattr(item, "_id", item._id)
    root = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert root is not None
    root.add_group(item)
    scheduler = object.__new__(LoadGroupScheduling)  # a run without processes has no scheduler
    assert scheduler._split_scope(item.nodeid) == "tests/architecture/test_workspace.py"
