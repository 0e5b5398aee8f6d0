"""`model.parametrization: mup` in a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_elarge.building.widths import scale_arguments
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from ed_elarge.model import eLargeModel
from ed_infra.rules import Rules
from run_files import small, with_changes, with_texts

BASE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def build_run(**changes: Any) -> Any:
    mup = {"model__parametrization": "mup", "model__base_widths": BASE}
    values = with_changes(**{**mup, **changes})
    return normalize(nodes.parse_yaml(json.dumps(values), "run.yaml"))


@pytest.mark.nightly
@pytest.mark.proves("parametrization", "base_widths")
def test_run_trains_with_scaled_values_and_rates(tmp_path: Path) -> None:
    values = small(with_texts(tmp_path))
    widths = {**BASE, "num_key_value_heads": 1}
    values["model"] |= {"parametrization": "mup", "base_widths": widths}
    values["base_config"] = {"values": {"scan_layers": False}}
    values["trainer"] |= {
        "weight_decay": 0.1,
        "learning_rate_rules": [["embed_tokens", 0.5], ["layers.0.mlp.up_proj", 2.0]],
        "frozen_parameters": "lm_head",
    }
    elm = eLargeModel(values)
    plain = eLargeModel({**values, "model": {**values["model"], **STANDARD}}).build_model()
    layer, other = (m.model.layers[1].mlp.up_proj for m in (elm.build_model(), plain))
    scaled, initial = (np.asarray(one.kernel.get_value()) for one in (layer, other))
    np.testing.assert_allclose(scaled, initial * 2**-0.5, rtol=1e-6)

    arguments = scale_arguments(elm)
    rates = Rules(arguments.learning_rate_rules, kind="learning rate rule")
    decays = Rules(arguments.weight_decay_rules, kind="weight decay rule")
    for name, rate, decay in (
        ("model.embed_tokens.embedding", 0.5, 0.1),
        ("model.layers.0.mlp.up_proj.kernel", 1.0, 0.2),
        ("model.layers.1.mlp.up_proj.kernel", 0.5, 0.2),
        ("model.layers.1.self_attn.o_proj.kernel", 0.5, 0.2),
        ("model.norm.weight", 1.0, 0.0),
    ):
        rate_rule, decay_rule = rates.match(name), decays.match(name)
        assert rate_rule is not None
        assert decay_rule is not None
        assert (rate_rule[1], decay_rule[1]) == (rate, decay)
    assert rates.match("lm_head.kernel") is None
    metrics = elm.train().metrics
    assert np.isfinite(metrics["eval_loss"])


STANDARD = {"parametrization": "standard", "base_widths": {}}


def test_optimizers_and_sections_without_widths_are_refused() -> None:
    build_run(trainer__optimizer="lion")
    for changes, words in (
        ({"trainer__optimizer": "muon"}, "not for muon, whose updates have another size"),
        ({"lora": {"rank": 2}}, "a model with lora has no µP"),
        ({"model__base_widths": ...}, "belong together"),
        ({"model__parametrization": "mpu"}, "did you mean 'mup'"),
    ):
        with pytest.raises(InputError, match=words):
            build_run(**changes)
