"""Every name in docs/config_reference.md has a test that proves its effect, or is in `LATER`.

A name in `LATER` must not have such a test.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.fields import FIELDS, WITHOUT_EFFECT, canonical_field
from ed_infra.config.files import StoredConfig

from tools import config_reference, yaml_reference

# When a name gets an effect, remove it here, in tools/config_reference.py and, if it is a field, in
# ed_infra.config.fields.WITHOUT_EFFECT.
LATER = {
    "hardware_abstraction",
    *("moe_tiling_size_batch", "moe_tiling_size_dim", "moe_tiling_size_seqlen"),
    *("pallas_k_block_size", "pallas_m_block_size", "pallas_n_block_size"),
}
# Names of this project that EasyDeL does not document.
OWN_FIELDS = {
    *("sharding_rules", "freq_max_position_embeddings", "mask_max_position_embeddings"),
    *("router_z_loss_coef", "router_bias_rate", "expert_capacity_factor", "native_kernels"),
    *("batch_invariant", "mtp_head"),
}
OWN_METHODS = {"from_dict", "from_json_file", "get_config_dict", "own_partition_rules"}
OWN_KEYWORDS = {"layer_type"}


def test_config_reference_page_is_up_to_date() -> None:
    written = config_reference.PAGE.read_text(encoding="utf-8")
    assert written == config_reference.page(), "run: uv run python -m tools.config_reference"
    assert "**missing**" not in written


def test_every_documented_name_has_a_test_or_is_listed_as_later(record_property) -> None:
    names, proven = config_reference.names(), config_reference.proofs()
    assert len(names) == len(set(names))
    assert set(config_reference.LATER) == LATER, "the two lists must be equal"
    missing = set(names) - set(proven) - LATER
    assert not missing, f"no test proves {sorted(missing)}: mark one with pytest.mark.proves"
    assert not LATER & set(proven), "these names have a test: remove them from the list"
    assert set(names) >= LATER
    # The keys of a run file have a separate page.
    keys = set(re.findall(r"^\| `(\w+)`", yaml_reference.PAGE.read_text("utf-8"), re.MULTILINE))
    unknown = {name for name in proven if name not in names and name not in keys}
    assert not unknown, f"proven, but not documented: {sorted(unknown)}"
    record_property(
        "summary",
        f"configuration reference: {len(names)} documented names, {len(names) - len(LATER)} proven "
        f"by {len({test for tests in proven.values() for test in tests})} tests, "
        f"{len(LATER)} without an effect yet",
    )


def test_later_fields_are_the_fields_without_effect() -> None:
    assert {name for name in LATER if name in FIELDS} == set(WITHOUT_EFFECT)


def test_config_reference_documents_every_field() -> None:
    fields = {canonical_field(name) for name in config_reference.names()} & set(FIELDS)
    assert fields == set(FIELDS) - OWN_FIELDS


def test_every_method_and_keyword_is_documented() -> None:
    names = set(config_reference.names())
    for cls in (EasyDeLBaseConfig, StoredConfig):
        for method, value in vars(cls).items():
            if method.startswith("_") or method in OWN_METHODS | {
                "known_keywords",
                "model_type",
                "nested_configs",
            }:
                continue
            if method in FIELDS or method in ("seal", "is_sealed", "replace", "compute_dtype"):
                continue
            assert method in names, f"{cls.__name__}.{method}"
            function = inspect.unwrap(getattr(value, "__func__", value))
            if not inspect.isfunction(function) or f"{method}(" not in " ".join(names):
                continue
            for keyword in inspect.signature(function).parameters.values():
                if keyword.name in ("self", "cls", *OWN_KEYWORDS):
                    continue
                if keyword.kind in (keyword.VAR_KEYWORD, keyword.VAR_POSITIONAL):
                    continue
                assert f"{method}({keyword.name})" in names, f"{method}({keyword.name})"


def test_missing_config_reference_row_is_detected(tmp_path: Path, monkeypatch) -> None:
    tests = tmp_path / "packages/p/tests"
    tests.mkdir(parents=True)
    (tests / "test_x.py").write_text(
        "@pytest.mark.proves('mesh')\n"
        "@pytest.mark.parametrize('a', [pytest.param(1, marks=proves('bits'))])\n"
        "def test_y(a): ...\n"
    )
    monkeypatch.setattr(config_reference, "ROOT", tmp_path)
    assert set(config_reference.proofs()) == {"mesh", "bits"}
    assert "| `jax_mesh` | **missing** |" in config_reference.page()
