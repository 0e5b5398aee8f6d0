"""`tools.new_family` reads modular files, and writes only families whose logits agree."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra import registry
from ed_models.conformance import TINY, Cases

from tests.conformance.cases import subjects
from tools.new_family import build, tiny
from tools.new_family.draft import Draft
from tools.new_family.lineage import Lineage, follow_parents, read_lineage
from tools.new_family.trace import STREAM, NotTraced, find_sum
from tools.new_family.variants import Sample, compare_variant, list_variants
from tools.new_family.write import format_cases
from tools.workspace import ROOT

DRAFT = Draft(
    model_type="mine",
    stem="Mine",
    config_class="LlamaConfig",
    model_class="MineForCausalLM",
    title="Mine: the layers of Llama.",
    modeling="modeling_mine",
)
#: Existing families that a nightly run drafts again: usual, bounds and windows, experts, factors.
REGENERATED = ("llama", "gemma2", "mixtral", "granite")

#: Faults of drafts: the family, a part of its source, the wrong part, and the variant that differs.
PLANTED = {
    "null window is ignored": (
        "ministral3",
        "MaskRule(window=parts.config.sliding_window)",
        "MaskRule(window=parts.config.sliding_window or 6)",
        "sliding_window=None",
    ),
    "positions only beside windows": (
        "exaone4",
        "if everywhere or window is not None",
        "if window is not None",
        "no layer has a window, null",
    ),
    "query without its factor": (
        "ministral3",
        "return q * scale[:, :, None, None].astype(q.dtype), k, v",
        "return q, k, v",
        "original_max_position_embeddings=8",
    ),
}


def find_models() -> Path:
    """Return the folder of the models of transformers."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "models"


def test_modular_file_states_parents_and_changed_methods() -> None:
    models = find_models()
    lineage = read_lineage(models / "olmo2/modeling_olmo2.py", "Olmo2")
    parts = {part.name: part for part in lineage.parts}
    assert parts["Olmo2RMSNorm"].parent_type == "llama"
    assert parts["Olmo2DecoderLayer"].changes == ("__init__", "forward")
    assert parts["Olmo2ForCausalLM"].changes == ()
    assert lineage.base in ("llama", "olmo")


def test_chain_of_parents_ends_at_known_type() -> None:
    chain = follow_parents("olmo2", {"llama"}, find_models())
    assert chain[0] == "olmo2"
    assert chain[-1] == "llama"


def test_sum_of_outputs_is_found_with_its_factors() -> None:
    rng = np.random.default_rng(0)
    known = {name: rng.normal(size=(2, 3, 8)) for name in (STREAM, "norm", "attention")}
    target = known[STREAM] + 0.5 * known["attention"]
    assert find_sum(target, known, "mlp") == {STREAM: 1.0, "attention": 0.5}
    with pytest.raises(NotTraced, match="mlp receives no sum of x, norm, attention"):
        find_sum(np.square(target), known, "mlp")


def test_no_family_is_drafted_if_no_switch_makes_the_logits_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "_compare", lambda draft, samples: {"row": 0.5})
    result = build.Result(Lineage((), ""), ["mine"], {})
    build._search(DRAFT, [], result)
    assert result.draft is None
    assert "the smallest difference is 5.0e-01" in result.unexplained
    assert len(result.tried) > 2


def test_draft_that_differs_in_a_variant_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differ(*_: object) -> list[tuple[str, str]]:
        return [("sliding_window=None", "logits differ by 2.0e-01")]

    monkeypatch.setattr(build, "_compare", lambda draft, samples: {"row": 0.0})
    monkeypatch.setattr(build, "load_draft", lambda draft: object)
    monkeypatch.setattr(build, "find_faults", differ)
    result = build.Result(Lineage((), ""), ["mine"], {})
    build._search(DRAFT, [Sample("llama", "usual", Cases({"usual": {}}))], result)
    assert result.draft is None
    assert "not with sliding_window=None: logits differ by 2.0e-01" in result.unexplained


def test_variants_change_each_choice_of_a_configuration() -> None:
    from transformers import AfmoeConfig

    fields = {**TINY, **tiny.build_rows(AfmoeConfig)["usual fields"]}
    variants = {variant.name: variant for variant in list_variants("afmoe", fields)}
    assert {
        *("sliding_window=None", "sliding_window=3", "no layer has a window, null"),
        *("other layers have windows", "all layers have windows", "layer_types=None"),
        *("num_key_value_heads=4", "tie_word_embeddings=True", "attention_bias=True"),
        *("mup_enabled=True", "route_scale=None", "num_dense_layers=2", "other factors"),
    } <= variants.keys()
    assert variants["sliding_window=None"].fields == {**fields, "sliding_window": None}
    assert variants["other factors"].fields["rms_norm_eps"] == 0.01


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("fault", PLANTED)
def test_variants_find_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, part, wrong, name = PLANTED[fault]
    subject = subjects(model_type)[0]
    family = subject.module_class
    source = inspect.getsource(sys.modules[family.__module__])
    assert part in source
    usual = Sample(model_type, "usual", Cases({"usual": subject.fields}, tiny=False))
    variant = next(v for v in list_variants(model_type, subject.fields) if v.name == name)
    assert compare_variant(variant, usual, family, source) is None

    monkeypatch.setattr(registry, "_configs", {**registry._configs})
    monkeypatch.setattr(registry, "_modules", {**registry._modules})
    module = types.ModuleType(family.__module__)
    exec(source.replace(part, wrong), vars(module))
    problem = compare_variant(variant, usual, getattr(module, family.__name__), source)
    assert problem is not None
    assert "logits differ by" in problem


def test_source_of_a_draft_is_a_module_in_the_style_of_the_families() -> None:
    source = DRAFT.source
    compile(source, "mine.py", "exec")
    assert source.startswith('"""Mine: the layers of Llama.\n\nNumbers follow')
    assert "class MineDecoderLayer(DecoderLayer):" in source
    names: dict[str, Any] = {}
    exec("def Cases(rows): return rows\n" + format_cases({"tied": {"head_dim": None}}), names)
    assert names["CASES"] == {"tied": {"head_dim": None}}


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.usefixtures("processes_with_torch")
@pytest.mark.parametrize("model_type", REGENERATED)
def test_regenerated_family_has_logits_of_the_family_by_hand(model_type: str) -> None:
    command = [sys.executable, "-m", "tools.new_family.compare", model_type]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{model_type}: equal" in done.stdout
