"""`import easydel as ed` is lazy and exports every name."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from importlib import metadata
from types import ModuleType

import EasyLM
import pytest
from easydel._table import MODULES, NAMES, SOURCES, find_names

PACKAGES = ("infra", "layers", "models", "data", "trainers", "esurge", "elarge")


@pytest.mark.parametrize("module", sorted(MODULES))
@pytest.mark.proves("easydel.infra")
def test_umbrella_modules_export_every_name(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in MODULES[module]:
        assert getattr(loaded, name) is not None
    assert set(MODULES[module]) <= set(dir(loaded))


@pytest.mark.parametrize("package", PACKAGES)
def test_umbrella_exports_public_names_of_packages(package: str) -> None:
    owner = importlib.import_module(f"ed_{package}")
    umbrella = importlib.import_module("easydel")
    assert set(owner.__all__) <= set(NAMES)
    for name in owner.__all__:
        assert getattr(umbrella, name) is getattr(owner, name)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("DeepseekV3Config", "ed_models.families.deepseek_v3"),
        ("Qwen3ForCausalLM", "ed_models.families.qwen3"),
        ("LlamaModel", "ed_models.families.llama"),
        ("DPOTrainer", "ed_trainers.methods.dpo"),
        ("GRPOConfig", "ed_trainers.options.groups"),
        ("AutoEasyDeLModelForSpeechSeq2Seq", "ed_models.auto"),
        ("AutoStateForCausalLM", "ed_trainers.auto_state"),
    ],
)
def test_umbrella_exports_families_trainers_and_auto_classes(name: str, owner: str) -> None:
    umbrella = importlib.import_module("easydel")
    assert getattr(umbrella, name).__module__ == owner
    assert name in dir(umbrella)


@pytest.mark.nightly
def test_every_class_that_the_umbrella_finds_can_be_imported() -> None:
    umbrella = importlib.import_module("easydel")
    names = find_names("easydel")
    assert len(names) > 400
    for name in names:
        assert getattr(umbrella, name) is not None


def test_importing_easydel_does_not_import_jax_or_transformers() -> None:
    code = "import easydel, sys; print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", sorted({*SOURCES, *EasyLM.SOURCES}))
def test_module_without_file_is_found_with_its_source(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.import_module(module)
    assert loaded.__spec__ == spec and loaded.__name__ == module
    assert all(pickle.loads(pickle.dumps(value)) is value for value in get_classes(loaded))
    with pytest.raises(ModuleNotFoundError, match=f"{module}.absent"):
        importlib.import_module(f"{module}.absent")


def get_classes(module: ModuleType) -> list[type]:
    return [value for value in vars(module).values() if isinstance(value, type)]


def test_modules_without_file_run_as_programs() -> None:
    for module in ("easydel.scripts.elarge", "EasyLM.scripts.diff_checkpoint"):
        command = [sys.executable, "-m", module, "--help"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "usage" in process.stdout.lower()
        spec = importlib.util.find_spec(module)
        assert spec is not None and isinstance(spec.origin, str), "`sys.argv[0]` is None"


def test_wrong_names_get_a_hint() -> None:
    umbrella = importlib.import_module("easydel")
    with pytest.raises(AttributeError, match="did you mean 'eLargeModel'"):
        umbrella.eLargeModl  # noqa: B018


def test_the_other_easydel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    umbrella = importlib.import_module("easydel")
    umbrella._refuse_the_other_easydel()  # none is installed here
    monkeypatch.setattr(metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ImportError, match=r"'easydel' 0\.2\.0 and 'ed-elarge' are both installed"):
        umbrella._refuse_the_other_easydel()


def test_no_name_is_public_in_two_packages() -> None:
    names = [n for p in PACKAGES for n in importlib.import_module(f"ed_{p}").__all__]
    assert sorted(set(names)) == sorted(names)
