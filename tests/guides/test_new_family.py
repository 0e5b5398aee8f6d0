"""`tools.new_family` reads modular files, and writes only families whose logits agree."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.new_family import build
from tools.new_family.draft import Draft
from tools.new_family.lineage import Lineage, follow_parents, read_lineage
from tools.new_family.trace import STREAM, NotTraced, find_sum
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
