"""The Python blocks of EasyDeL's infrastructure and configuration guides run unchanged.

The blocks of a page run from top to bottom in one namespace. Only the names in `STAND_INS` are
replaced: names on the hub, the backend, and families that are not part of the packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.sharding import placement
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from jax.sharding import PartitionSpec

from tests.snippets.pages import Block, blocks

HERE = Path(__file__).parent

#: Text in a block -> its replacement; `{}` is the folder of the test.
STAND_INS = {
    '"organization/model-name"': '"{}/mine"',
    '"meta-llama/Llama-2-7b-hf"': '"{}/llama"',
    '"meta-llama/Llama-2-70b-hf"': '"{}/llama"',
    '"deepseek/DeepSeek-V3"': '"{}/mine"',
    'backend="tpu"': 'backend="cpu"',
}


def run(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Execute one block in a namespace."""
    body = block.body
    for old, new in STAND_INS.items():
        body = body.replace(old, new.format(folder))
    source = "\n" * (block.line - 1) + body
    exec(compile(source, str(block.page), "exec"), names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with local models that replace repositories on the hub."""
    fields = tiny_llama(num_hidden_layers=1)
    del fields["model_type"]
    LlamaForCausalLM.create(LlamaConfig(**fields)).save_pretrained(tmp_path / "llama")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text('{"model_type": "my_model", "hidden_size": 64}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Hub:
    """A hub client that records the uploads."""

    uploads: list[tuple[str, list[str]]]

    def __init__(self, token: Any = None) -> None:
        Hub.uploads = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return type("Repo", (), {"repo_id": repo_id})

    def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> str:
        self.uploads.append((repo_id, sorted(p.name for p in Path(folder_path).iterdir())))
        return "done"


def test_overview_blocks_run_as_documented(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    *imports, composed, inspected, hub = blocks(HERE / "infra_overview.md")
    names: dict[str, Any] = {"jnp": jnp}
    for block in imports:
        run(block, names, folder)
    assert names["register_config"].__module__ == "ed_infra.registry"

    exec("from easydel import EasyGenerationMixin, EasyBridgeMixin", names)
    run(composed, names, folder)
    assert issubclass(names["MyModel"], names["EasyDeLBaseModule"])

    run(hub, names, folder)
    model = names["model"]
    assert model.dtype == jnp.bfloat16 and model.mesh.size == 8
    assert (folder / "my-model/model.safetensors").is_file()
    [(repository, files)] = Hub.uploads
    assert repository == "my-username/my-model" and {"config.json", "model.safetensors"} <= {*files}

    run(inspected, names, folder)
    rules = dict(model._get_partition_rules())
    assert rules[r"^model\.layers\.\d+\.self_attn\.q_proj\.kernel$"] == PartitionSpec("fsdp", "tp")
    assert placement.specs(model, model.config, overrides=tuple(rules.items())) == placement.specs(
        model, model.config
    )


class Checks:
    """Assertions after the blocks of the configuration guide, one method per heading."""

    @staticmethod
    def easydel_specific_parameters(config: Any, **_: Any) -> None:
        assert (config.attn_mechanism, config.moe_method) == ("flash_attn2", "standard_moe")
        assert (config.hidden_size, config.vocab_size) == (4096, 32000)
        assert config.mesh.shape["fsdp"] == 8

    @staticmethod
    def creating_a_mesh(mesh: Any, jax_mesh: Any, **_: Any) -> None:
        assert dict(mesh.shape) == {"dp": 1, "fsdp": 2, "ep": 1, "tp": 4, "sp": 1}
        assert jax_mesh.shape["fsdp"] == 8

    @staticmethod
    def understanding_axis_dimensions(config: Any, **_: Any) -> None:
        changed = config.replace(sharding_axis_dims=(1, 2, 1, 2, 1))  # eight devices, not sixteen
        assert dict(changed.mesh.shape) == {"dp": 1, "fsdp": 4, "ep": 1, "tp": 2, "sp": 1}

    @staticmethod
    def rope_scaling_for_extended_context(config: Any, **_: Any) -> None:
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.granted_freq_max_position_embedding == 4 * 4096

    @staticmethod
    def accessing_rope_values(frequencies: Any, sin: Any, cos: Any, **_: Any) -> None:
        assert jnp.asarray(frequencies).shape == (4096, 128)
        # yarn scales both by 0.1 ln 4 + 1.
        norm = np.asarray(sin, np.float64) ** 2 + np.asarray(cos, np.float64) ** 2
        np.testing.assert_allclose(norm, (0.1 * np.log(4.0) + 1) ** 2, rtol=1e-5)

    @staticmethod
    def getting_causal_masks(causal_mask: Any, fcm_mask: Any, **_: Any) -> None:
        mask = np.asarray(causal_mask)
        assert mask.dtype == np.float32 and mask.shape == (1, 1, 2048, 2048)
        np.testing.assert_array_equal(mask[0, 0], np.tri(2048))
        kept = np.asarray(fcm_mask).mean()
        assert fcm_mask.shape == (4, 1, 64, 64) and 0.8 < kept < 1

    @staticmethod
    def saving_and_loading(config: Any, MyModelConfig: type, config_dict: dict, **_: Any) -> None:
        assert config_dict["hidden_size"] == config.hidden_size == 64
        assert MyModelConfig.from_json_file("config.json") == config  # type: ignore[attr-defined]
        assert Path("my-model/config.json").is_file()

    @staticmethod
    def handling_extra_arguments(config: Any, MyModelConfig: type, **_: Any) -> None:
        config.save_pretrained("extra")
        again = MyModelConfig.from_pretrained("extra")  # type: ignore[attr-defined]
        assert (again.my_custom_param, again.another_param) == ("value", 42)

    @staticmethod
    def configuration_inheritance(MyCustomConfig: type, **_: Any) -> None:
        config = MyCustomConfig(custom_param=7, attn_mechanism="ring")
        config.save_pretrained("custom")
        again = MyCustomConfig.from_pretrained("custom")  # type: ignore[attr-defined]
        assert (again.custom_param, again.attn_mechanism) == (7, "ring") and again == config


def heading(block: Block) -> str:
    """Return the heading over a block as the name of a check."""
    rows = block.page.read_text(encoding="utf-8").splitlines()[: block.line]
    title = next(row for row in reversed(rows) if row.startswith("## "))[3:].split("(")[0]
    words = "".join(c if c.isalnum() else " " for c in title.lower().replace("-", " ")).split()
    return "_".join(words)


def test_configuration_guide_blocks_run_as_documented(folder: Path) -> None:
    page = {heading(block): block for block in blocks(HERE / "base_config.md")}
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "PartitionSpec": PartitionSpec}
    names |= {"LlamaConfig": LlamaConfig, "batch_size": 4, "seq_len": 64}
    # The guide uses a name one block before its definition. The last example's family is replaced.
    run(page["basic_structure"], names, folder)
    ahead = dict(names)
    run(page["partition_rules"], ahead, folder)
    names["MyMoEModelConfig"] = names["DeepseekV3Config"] = ahead["MyMoEModelConfig"]
    checked = set()
    for name, block in page.items():
        run(block, names, folder)
        check = getattr(Checks, name, None)
        if check is not None:
            check(**names)
            checked.add(name)
    assert checked == {name for name in vars(Checks) if not name.startswith("_")}
