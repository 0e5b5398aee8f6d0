"""`import easydel as ed` is lazy and exports every name."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from functools import reduce
from importlib import metadata
from types import ModuleType

import EasyLM
import pytest
from easydel._other_names import ABSENT, COUNTERPARTS
from easydel._table import FAMILY_PATHS, MODULES, NAMES, SOURCES, find_names

PACKAGES = ("infra", "layers", "models", "data", "trainers", "esurge", "elarge")
GROUPS = sorted({module.partition(".")[2].partition(".")[0] for module in MODULES})
#: A few of the modules of families; the nightly test loads all of them.
FAMILIES = (
    "easydel.modules.llama",
    "easydel.modules.qwen2.modeling_qwen",
    "easydel.modules.gemma3",
)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.proves("easydel.infra")
def test_umbrella_modules_export_every_name(group: str) -> None:
    for module, names in MODULES.items():
        if module.partition(".")[2].partition(".")[0] == group:
            loaded = importlib.import_module(module)
            for name in names:
                assert getattr(loaded, name) is not None
            assert set(names) <= set(dir(loaded))


@pytest.mark.parametrize("module", FAMILIES)
def test_modules_of_families_export_their_classes(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in find_names(module):
        assert getattr(loaded, name) is not None and name in dir(loaded)


@pytest.mark.nightly
def test_every_module_of_a_family_exports_a_configuration_and_models() -> None:
    for module in FAMILY_PATHS:
        names = find_names(module)
        assert {"Config", "Model"} <= {
            end for end in ("Config", "Model") for n in names if end in n
        }
        assert set(names) <= set(dir(importlib.import_module(module)))


def test_submodules_are_attributes_without_an_import() -> None:
    code = "import easydel as ed; print(ed.modules.llama.LlamaConfig.model_type, ed.layers.moe)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("llama <module 'easydel.layers.moe'")


def test_name_without_counterpart_is_an_error_with_its_reason() -> None:
    umbrella = importlib.import_module("easydel")
    for name, reason in ABSENT.items():
        with pytest.raises(AttributeError) as error:
            reduce(getattr, name.split("."), umbrella)
        assert reason in str(error.value)
    assert not set(ABSENT) & {*NAMES, *COUNTERPARTS, *find_names("easydel")}


def test_other_names_of_easydel_are_objects_that_do_the_same() -> None:
    umbrella = importlib.import_module("easydel")
    assert umbrella.Llama4ForSequenceClassification.config_class is umbrella.Llama4TextConfig
    assert umbrella.Gemma3Config.model_type == "gemma3"
    assert umbrella.Gemma3TextConfig.model_type == "gemma3_text"
    assert umbrella.FlashAttn.name == "flash_attn2"
    config, module = umbrella.get_modules_by_type("qwen3", umbrella.TaskType.CAUSAL_LM)
    assert (config, module) == (umbrella.Qwen3Config, umbrella.Qwen3ForCausalLM)


def test_enums_of_easydel_name_every_value_of_their_options() -> None:
    from typing import get_args

    from ed_infra import enums
    from ed_trainers.options import optimizers

    def values(enum: type[enums.StrEnum]) -> set[str]:
        return {member.value for member in enum}

    mechanisms = set(get_args(enums.AVAILABLE_ATTENTION_MECHANISMS))
    assert values(enums.AttentionMechanisms) == mechanisms
    assert values(enums.MoEMethods) == set(get_args(enums.AVAILABLE_MOE_METHODS))
    assert values(optimizers.EasyDeLOptimizers) == set(optimizers.OPTIMIZERS)
    assert values(optimizers.EasyDeLSchedulers) == set(optimizers.SCHEDULERS)
    umbrella = importlib.import_module("easydel")
    for name in enums.QuantizationType:
        assert umbrella.EasyDeLQuantizationConfig(dtype=name).dtype


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
    assert len(names) > 700
    for name in names:
        assert getattr(umbrella, name) is not None


def test_importing_easydel_does_not_import_jax_or_transformers() -> None:
    code = "import easydel, sys; print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", sorted({*SOURCES, *EasyLM.SOURCES} - {*FAMILY_PATHS}))
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
