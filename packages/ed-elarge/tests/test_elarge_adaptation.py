"""Adapters and quantized weights from a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from ed_elarge.certify.receipt import findings
from ed_elarge.certify.subject import CertifiedModel
from ed_elarge.errors import InputError
from ed_elarge.model import eLargeModel
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.adapters.lora import lora_layers
from run_files import run, small, with_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a base model of a few steps in `base/model`."""
    path = with_texts(tmp_path_factory.mktemp("adaptation"))
    settings = small(path, actions=["train"])
    settings["trainer"] |= {"save_directory": str(path / "base"), "max_training_steps": 60}
    settings["trainer"]["learning_rate"] = 0.01
    assert run(settings) == 0
    return path


def adapted(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A run on the base, which writes to the folder `name`."""
    settings = small(folder, model={"name_or_path": str(folder / "base" / "model")}, **changes)
    settings["trainer"]["save_directory"] = str(folder / name)
    return settings


GENERATE = {"generate": {"prompts": ["The "], "max_tokens": 3}}


def losses(folder: Path) -> list[float]:
    """Of each step of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def assert_merge_equals_adapter(settings: dict[str, Any], left: Path) -> None:
    """Compare the saved model of a run with its base and its saved adapter."""
    merged = eLargeModel({"model": {"name_or_path": str(left / "model")}})
    apart = eLargeModel(
        {"model": settings["model"], "lora": {"name_or_path": str(left / "adapter")}}
    )
    ids = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_allclose(
        merged.build_model()(ids).logits, apart.build_model()(ids).logits, atol=1e-5
    )


@pytest.mark.nightly
@pytest.mark.xdist_group("elarge-adaptation")
def test_merged_model_matches_model_with_saved_adapter(folder: Path) -> None:
    """Only adapters are trained; the saved model serves, with adapters in PEFT's layout."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "mlp"]}
    settings = adapted(folder, "adapted", lora=lora, actions=["train", GENERATE])
    assert run(settings) == 0
    left = folder / "adapted"
    said = json.loads((left / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 8.0)
    assert sorted(said["target_modules"]) == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert_merge_equals_adapter(settings, left)


@pytest.mark.nightly
@pytest.mark.xdist_group("elarge-adaptation")
def test_adapter_from_the_weights_is_trained_saved_and_certified(folder: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": "PiSSA"}
    settings = adapted(folder, "pissa", lora=lora, actions=["train", GENERATE])
    settings["trainer"] |= {"max_training_steps": 20, "log_steps": 1}
    assert run(settings) == 0
    left, base = folder / "pissa", folder / "base" / "model"
    curve = losses(left)
    assert np.mean(curve[-5:]) < np.mean(curve[:5])
    written = json.loads((left / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (8, 16.0)
    assert_merge_equals_adapter(settings, left)
    found = {one.name: one for one in findings(CertifiedModel(left, base), with_model=True)}
    for name in ("adapter_tensors", "adapter_effect", "merge", "changed", "untouched"):
        assert found[name].status == "passed", found[name]


@pytest.mark.nightly
@pytest.mark.xdist_group("elarge-adaptation")
@pytest.mark.parametrize("method", ["nf4", "8bit", "gguf"])
def test_adapters_of_a_quantized_base(
    folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a section lora they have rank 16; the loss falls, and the base stays bit for bit."""
    group = {} if method == "gguf" else {"group_size": 32}
    quantization = {"model": {"quantization_method": method, **group}}
    settings = adapted(folder, method, quantization=quantization, actions=["train", GENERATE])
    if method == "gguf":
        base = folder / "base" / "model"
        model = AutoEasyDeLModelForCausalLM.from_pretrained(base)
        file = model.save_gguf(folder / "base.gguf", tokenizer=base, dtype="q8_0")
        settings["model"] = {"name_or_path": str(file)}
    settings["trainer"] |= {"max_training_steps": 60, "learning_rate": 0.02, "log_steps": 1}
    assert run(settings) == 0
    assert "adapters of rank 16" in capsys.readouterr().out
    curve = losses(folder / method)
    assert np.mean(curve[-10:]) < np.mean(curve[:10]) - 0.1
    assert not (folder / method / "model").exists()
    served = yaml.safe_load((folder / method / "serve.yaml").read_text())
    assert served.pop("actions") == ["serve"]

    learned, base = (
        eLargeModel(served).build_model(),
        eLargeModel({"model": settings["model"], "quantization": quantization}).build_model(),
    )
    assert learned.is_quantized and learned.lora_is_enabled
    own = {path: layer.kernel.get_value() for path, layer in lora_layers(learned)}
    assert own
    for path, kernel in own.items():
        module: Any = base
        for part in path:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        jax.tree.map(np.testing.assert_array_equal, module.kernel.get_value(), kernel)


@pytest.mark.nightly
@pytest.mark.xdist_group("elarge-adaptation")
@pytest.mark.proves("merge_adapters")
def test_adapter_merges_into_dequantized_base(folder: Path) -> None:
    quantization = {"model": {"method": "nf4"}}
    lora = {"rank": 4}
    settings = adapted(folder, "merged", quantization=quantization, lora=lora, actions=["train"])
    settings["trainer"]["merge_adapters"] = True
    assert run(settings) == 0
    merged = eLargeModel({"model": {"name_or_path": str(folder / "merged" / "model")}})
    apart = eLargeModel(
        {
            "model": settings["model"],
            "quantization": quantization,
            "lora": {"name_or_path": str(folder / "merged" / "adapter")},
        }
    )
    ids = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_allclose(
        merged.build_model()(ids).logits, apart.build_model()(ids).logits, atol=1e-4
    )


@pytest.mark.nightly
def test_quantization_requires_apply_quantization(folder: Path) -> None:
    sections = {
        "model": {"name_or_path": str(folder / "base" / "model")},
        "quantization": {"apply_quantization": False, "model": {"quantization_method": "nf4"}},
    }
    with pytest.warns(UserWarning, match="apply_quantization is false"):
        assert not eLargeModel(sections).build_model().is_quantized
    elm = eLargeModel({"model": sections["model"]}).set_quantization(method="nf4", group_size=16)
    assert elm.build_model().is_quantized


@pytest.mark.nightly
def test_keys_and_values_in_eight_bits(folder: Path) -> None:
    elm = eLargeModel(
        {
            "model": {"name_or_path": str(folder / "base" / "model")},
            "quantization": {"kv_cache": {"quantization_method": "8bit", "group_size": 8}},
        }
    )
    said = elm.build_model().config.kv_cache_quantization_config
    assert (said.dtype, said.group_size) == ("int8", 8)


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"lora": {"rank": 0}}, "lora.rank", "greater than or equal to 1"),
        ({"lora": {"targets": ["qproj"]}}, "lora.targets", "qproj"),
        ({"lora": {"rnk": 4}}, "lora.rnk", "did you mean 'rank'"),
        ({"lora": {"name_or_path": "EMPTY"}}, "lora.name_or_path", "no adapter_config.json"),
        ({"lora": {"init_lora_weights": "eva"}}, "lora.init_lora_weights", "needs rows of data"),
        ({"lora": {"loftq_config": {}}}, "lora", "set init_lora_weights to loftq"),
        (
            {"lora": {"init_lora_weights": "loftq"}, "quantization": {"model": {"method": "nf4"}}},
            "lora.init_lora_weights",
            "loftq computes codes of the weights itself",
        ),
        (
            {"lora": {"init_lora_weights": "pissa"}, "quantization": {"model": {"method": "nf4"}}},
            "lora.init_lora_weights",
            "pissa decomposes the weights of the base, and quantization rounds them",
        ),
        ({"quantization": {"model": {"group_size": 5}}}, "quantization.model", "5"),
        ({"quantization": {"model": {"pattern": "qproj"}}}, "quantization.model", "qproj"),
    ],
)
@pytest.mark.daily("changes3*", "changes2*")
def test_invalid_adaptation_settings_raise_input_error(
    folder: Path, tmp_path: Path, changes: dict[str, Any], where: str, words: str
) -> None:
    changes = json.loads(json.dumps(changes).replace("EMPTY", str(tmp_path)))
    with pytest.raises(InputError) as error:
        run(adapted(folder, "no", **changes))
    assert where in str(error.value)
    assert words in str(error.value)
