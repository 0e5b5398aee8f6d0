"""config.json: unknown keys are kept, transformers reads the file, and keywords are validated."""

from __future__ import annotations

import json

import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


@pytest.fixture
def folder(tmp_path):
    fields = tiny_llama(
        rope_theta=1234.0,
        rope_scaling={"type": "linear", "factor": 2.0},
        torch_dtype="bfloat16",
        temperature=0.3,
        architectures=["LlamaForCausalLM"],
        of_the_hub={"a": [1, 2]},
    )
    fields.pop("head_dim")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_old_spellings_and_unknown_keys(folder):
    config = LlamaConfig.from_pretrained(folder)
    assert config.of_the_hub == {"a": [1, 2]}
    assert config.rope_parameters == {
        "type": "linear",
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 1234.0,
    }
    assert str(config.dtype).endswith("bfloat16")
    assert config.head_dim == 8


@pytest.mark.parametrize("switch", [True, False])
def test_gradient_checkpointing_switch_of_old_files_is_ignored(folder, switch):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gradient_checkpointing": switch}))
    plain = LlamaConfig().gradient_checkpointing
    assert LlamaConfig.from_pretrained(folder).gradient_checkpointing == plain


def test_a_round_trip_keeps_everything(folder):
    config = LlamaConfig.from_pretrained(folder, attn_mechanism="splash", axis_dims=(1, 1, 1, 1, 1))
    config.attach_custom_arguments(mine=[1, 2])
    config.save_pretrained(folder / "out")
    again = LlamaConfig.from_pretrained(folder / "out")
    assert again == config
    assert (again.attn_mechanism, again.mine) == ("blocksparse", [1, 2])
    config.to_json_file(folder / "one.json")
    assert LlamaConfig.from_json_file(folder / "one.json") == config


def test_transformers_reads_saved_config(folder):
    given = {"kv_cache_quantization_config": {"dtype": "int8"}, "attn_mechanism": "ring"}
    LlamaConfig.from_pretrained(folder, **given).save_pretrained(folder / "out")
    written = json.loads((folder / "out" / "config.json").read_text())
    theirs = transformers.AutoConfig.from_pretrained(folder)
    theirs.save_pretrained(folder / "theirs")
    expected = json.loads((folder / "theirs" / "config.json").read_text())
    section = written.pop("easydel")
    assert written == expected
    assert section["attn_mechanism"] == "ring"
    read = transformers.AutoConfig.from_pretrained(folder / "out")
    assert type(read) is transformers.LlamaConfig
    assert not hasattr(read, "quantization_config")
    assert read.rope_parameters == theirs.rope_parameters


def test_defaults_leave_no_trace_in_the_file(folder):
    LlamaConfig.from_pretrained(folder).save_pretrained(folder / "out")
    assert "easydel" not in json.loads((folder / "out" / "config.json").read_text())


def test_a_quantized_checkpoint_keeps_its_own_section(folder):
    config = LlamaConfig.from_pretrained(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    config.save_pretrained(folder / "out")
    written = json.loads((folder / "out" / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "fp8"


def test_keywords_are_checked_though_keys_of_the_file_are_not(folder):
    with pytest.raises(ConfigError, match="'atn_mechanism'; did you mean 'attn_mechanism'"):
        LlamaConfig.from_pretrained(folder, atn_mechanism="ring")
    _, unused = LlamaConfig.from_pretrained(folder, other=1, return_unused_kwargs=True)
    assert unused == {"other": 1}
    assert LlamaConfig.from_pretrained(folder, of_the_hub=3).of_the_hub == 3
    changed = LlamaConfig.from_pretrained(folder, rope_theta=7.0)
    assert (changed.rope_theta, changed.rope_parameters["factor"]) == (7.0, 2.0)
    plain = LlamaConfig.from_pretrained(folder, rope_scaling=None)
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 1234.0}
    with pytest.raises(ConfigError, match="unknown field 'of_the_hub'"):
        LlamaConfig(of_the_hub=3)


def test_an_unknown_key_in_our_own_section_is_an_error(folder):
    fields = json.loads((folder / "config.json").read_text())
    fields["easydel"] = {"attn_mechanisms": "ring"}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="did you mean 'attn_mechanism'"):
        LlamaConfig.from_pretrained(folder)


def test_config_round_trips_through_remote_address(folder):
    config = LlamaConfig.from_pretrained(folder)
    config.save_pretrained("memory://infra/model")
    assert LlamaConfig.from_pretrained("memory://infra/model") == config


def test_our_class_loads_torch_models_configuration(folder):
    """The rope functions of transformers write into a sealed configuration."""
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig.from_pretrained(folder).seal()
    frequencies, _ = ROPE_INIT_FUNCTIONS["linear"](config, "cpu")
    assert frequencies.shape == (4,)
