"""The matrix mechanism x feature: every declared cell against float64, every other cell an error.

Errors are relative to the largest value of their tensor.
"""

from __future__ import annotations

from dataclasses import replace

import attention_cases as cases
import attention_pages as pages
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CELLS
from attention_reference import error
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import MECHANISMS, Mechanism
from ed_layers.attention.mechanism import check_mechanism
from ed_layers.attention.scoring import FEATURES, Scoring

FORWARD, GRADIENT = 1e-5, 1e-4
# bfloat16 has 8 bits: half a step is 2e-3 of a value; of inputs that are rounded already.
BF16_FORWARD, BF16_GRADIENT = 1e-2, 2e-2

#: Features of the cells. `test_layers_ahead.py` tests the other one, which is part of the mask.
OF_CELLS = set(FEATURES) - {"ahead"}


def measure(name: str, cell_name: str, groups: int, dtype: str | None = None) -> dict[str, float]:
    """Errors of one cell by tensor: the output, and the gradients where the mechanism has any."""
    cell, kind = CELLS[cell_name], MECHANISMS[name].reads
    mechanism = cases.mechanism_of(name, cell.features, attn_dtype=dtype)
    if kind == "pages":
        case = pages.case_of(cell, groups)
        return {"out": error(pages.run(case, mechanism), case.run()["out"])}
    if kind == "cache":
        case = cases.decode_case(cell, groups)
        return {"out": error(cases.run(case, mechanism, cached=True)["out"], case.run()["out"])}
    case = cases.case_of(cell, groups)
    rounded = {
        n: np.asarray(jnp.asarray(getattr(case, n), dtype or "float32"), np.float32) for n in "qkv"
    }
    case = replace(case, **rounded)
    d_out = cases.noise(case)
    expected, found = case.run(d_out), cases.run(case, mechanism, d_out)
    return {tensor: error(found[tensor], expected[tensor]) for tensor in expected}


def test_cell_names_match_their_features() -> None:
    infos = {causal: MaskInfo.full(1, 1, causal) for causal in (True, False)}
    for name, cell in CELLS.items():
        case = cases.case_of(cell)
        names = ("window", "chunk", "soft_cap", "sinks", "bias", "alibi", "relative")
        given = {n: getattr(case, n) for n in names}
        scoring = Scoring(1.0, **given, dropout=0.1 if cell.dropout else 0.0)
        used = scoring.features(jnp.asarray(case.q), jnp.asarray(case.v), infos[case.mask.causal])
        assert used == cell.features == set(name.split("+")) - {"causal"} or name == "everything"
    assert {feature for cell in CELLS.values() for feature in cell.features} == OF_CELLS


def test_gradients_of_the_reference_are_its_slopes() -> None:
    case = cases.case_of(replace(CELLS["everything"], relative=True))
    draw = np.random.default_rng(2)
    d_out = draw.normal(size=(*case.q.shape[:3], case.v.shape[-1]))
    grads = case.run(d_out)
    for name in ("q", "k", "v", "sinks", "bias", "relative"):
        value = np.asarray(getattr(case, name), np.float64)
        way = draw.normal(size=value.shape)
        up, down = (
            np.sum(replace(case, **{name: value + step * way}).run()["out"] * d_out)
            for step in (1e-5, -1e-5)
        )
        np.testing.assert_allclose((up - down) / 2e-5, np.sum(grads[name] * way), rtol=1e-6)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.daily("vanilla", "page_attention")
def test_one_cell_of_each_mechanism(name) -> None:
    errors = measure(name, cases.usual_cell(name), groups=2)
    assert errors.pop("out") <= FORWARD
    assert max(errors.values(), default=0.0) <= GRADIENT, errors


@pytest.mark.nightly
def test_slopes_on_a_ring_follow_heads_that_are_split() -> None:
    mechanism = cases.mechanism_of("ring", sharding_axis_dims=(1, 1, 1, 2, 2))
    case = cases.case_of(CELLS["alibi"])
    d_out = cases.noise(case)
    expected, found = case.run(d_out), cases.run(case, mechanism, d_out)
    errors = {tensor: error(found[tensor], expected[tensor]) for tensor in expected}
    assert errors.pop("out") <= FORWARD
    assert max(errors.values()) <= GRADIENT, errors


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("groups", [2, 1], ids=["gqa", "mqa"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_attention_cell_matches_float64_reference(name, groups, record_property) -> None:
    table = {cell: measure(name, cell, groups) for cell in cases.declared(name)}
    record_property("summary", report(f"{name}, {groups} kv heads", table))
    outs = {cell: errors["out"] for cell, errors in table.items()}
    grads = {
        (cell, tensor): value
        for cell, errors in table.items()
        for tensor, value in errors.items()
        if tensor != "out"
    }
    assert {cell: value for cell, value in outs.items() if not value <= FORWARD} == {}
    assert {at: value for at, value in grads.items() if not value <= GRADIENT} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.readers("projected"))
def test_bfloat16_attention_matches_float64_reference(name, record_property) -> None:
    """`attn_dtype: bfloat16`, against float64 on the rounded numbers."""
    errors = measure(name, "causal", 2, "bfloat16")
    record_property("summary", report(f"{name}, bfloat16", {"causal": errors}))
    assert errors.pop("out") <= BF16_FORWARD
    assert max(errors.values()) <= BF16_GRADIENT, errors


def report(title: str, table: dict[str, dict[str, float]]) -> str:
    """A table of errors: a row per cell, a column per tensor."""
    tensors = ("out", "q", "k", "v", "sinks", "bias", "relative")
    rows = [f"{title:28}" + "".join(f"{tensor:>9}" for tensor in tensors)]
    for cell, errors in table.items():
        numbers = (f"{errors[t]:9.1e}" if t in errors else " " * 9 for t in tensors)
        rows.append(f"  {cell:26}" + "".join(numbers))
    return "\n".join(row.rstrip() for row in rows)


# What a mechanism cannot be asked for: a step of serving has no such argument or no such layer.
NEVER_ASKED = {
    "projected": set(),
    "cache": {"cross", "dropout"},
    "pages": {"cross", "dropout", "bidirectional", "bias"},
}
UNDECLARED = [
    (name, feature)
    for name, ability in MECHANISMS.items()
    for feature in sorted(OF_CELLS)
    if feature not in ability.features and feature not in NEVER_ASKED[ability.reads]
]


@pytest.mark.parametrize(("name", "feature"), UNDECLARED)
def test_an_undeclared_cell_is_refused_when_a_model_is_built(name, feature) -> None:
    with pytest.raises(ConfigError, match=rf"cannot do .*{feature}.*these can: ") as caught:
        cases.mechanism_of(name, frozenset({feature}))
    offered = str(caught.value).split("these can: ")[1].split(", ")
    assert all(feature in MECHANISMS[other].features for other in offered if other)


@pytest.mark.parametrize(("name", "feature"), UNDECLARED)
def test_an_undeclared_cell_is_refused_when_called(name, feature) -> None:
    cell, reads = CELLS[feature], MECHANISMS[name].reads
    built = replace(cases.mechanism_of(name), dropout=cases.DROPOUT if cell.dropout else 0.0)
    run = {
        "projected": lambda: cases.run(cases.case_of(cell), built),
        "cache": lambda: cases.run(cases.decode_case(cell), built, cached=True),
        "pages": lambda: pages.run(pages.case_of(cell), built),
    }[reads]
    with pytest.raises(ConfigError, match=feature):
        run()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "feature"), [it for it in UNDECLARED if it[0] in cases.readers("projected")]
)
def test_undeclared_cell_is_rejected_for_cache_reads(name, feature) -> None:
    dropout = cases.DROPOUT if CELLS[feature].dropout else 0.0
    for built in (Mechanism(decode=name, dropout=dropout), Mechanism(name, dropout=dropout)):
        case = cases.decode_case(CELLS[feature], count=2)
        with pytest.raises(ConfigError, match=feature):
            cases.run(case, built, cached=True)


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        cases.config(attn_mechanism="vanila")
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        check_mechanism("attn_mechanism", "vanila", frozenset(), reads=("projected",))
    assert Mechanism("vanilla") == Mechanism("vanilla", config=object())
