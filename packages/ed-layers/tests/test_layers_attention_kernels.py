"""Kernels of another package: chosen, refused with their reasons, and listed; in all readings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import attention_cases as cases
import attention_pages as pages
import attention_toy_kernel as toy
import numpy as np
import pytest
from attention_cases import CELLS
from attention_reference import error
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_layers.attention import Mechanism, kernels
from ed_layers.attention.mechanism import check_language


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Declare entry points, as an installed package would; by default the toy's kernels."""

    def declare(*values: str) -> None:
        points = [EntryPoint(f"toy{i}", v, kernels.KERNEL_GROUP) for i, v in enumerate(values)]
        monkeypatch.setattr(kernels, "entry_points", lambda group: points)
        kernels.kernels.cache_clear()
        # Programs that were traced before have chosen already.
        cases.program.cache_clear()
        pages.program.cache_clear()

    declare("attention_toy_kernel:KERNELS")
    toy.RAN.clear()
    forget_said()
    yield declare
    monkeypatch.undo()
    for cached in (kernels.kernels, cases.program, pages.program):
        cached.cache_clear()


@pytest.mark.nightly
def test_auto_selects_installed_kernel_for_forward_and_backward(installed, caplog) -> None:
    case = cases.case_of(CELLS["window"])
    d_out = cases.noise(case)
    with caplog.at_level(logging.INFO, logger="easydel"):
        found = cases.run(case, Mechanism("auto"), d_out)
    assert toy.RAN == ["projected"]
    said = [record.getMessage() for record in caplog.records]
    assert "attention: auto takes 'flash_attn2' on cpu: its kernel fits" in said
    assert "attention: 'flash_attn2' runs toy projected kernel" in said
    for tensor, expected in case.run(d_out).items():
        assert error(found[tensor], expected) <= 1e-4, tensor


def test_rejected_kernel_call_logs_reasons_and_falls_back_to_xla(installed, caplog) -> None:
    case = replace(cases.case_of(CELLS["window+sinks"]), soft_cap=3.0)
    case = replace(case, q=case.q[..., :12], k=case.k[..., :12])
    with caplog.at_level(logging.INFO, logger="easydel"):
        found = cases.run(case, cases.mechanism_of("flash_attn2"))["out"]
    assert not toy.RAN
    assert error(found, case.run()["out"]) <= 1e-5
    (said,) = [r.getMessage() for r in caplog.records if "toy" in r.getMessage()]
    assert said == (
        "attention: 'flash_attn2' runs plain XLA, block by block; toy projected kernel does not "
        "support a soft cap, sinks, a head dim of 12 (it has multiples of 8)"
    )


@pytest.mark.nightly
def test_installed_kernel_reads_cache_and_pages(installed) -> None:
    cell = CELLS["window"]
    case = cases.decode_case(cell)
    found = cases.run(case, Mechanism(), cached=True)["out"]
    assert error(found, case.run()["out"]) <= 1e-5
    case = pages.case_of(cell)
    assert error(pages.run(case, Mechanism()), case.run()["out"]) <= 1e-5
    assert set(toy.RAN) == {"cache", "pages"}
    toy.RAN.clear()
    case = cases.decode_case(CELLS["sinks"])
    cases.run(case, Mechanism(), cached=True)
    cases.run(cases.decode_case(cell), Mechanism(decode="vanilla"), cached=True)
    assert not toy.RAN, "it lacks sinks, and a mechanism that is asked for by name is taken"


def test_plain_xla_can_be_asked_for(installed) -> None:
    case = cases.case_of(CELLS["causal"])
    cases.run(case, Mechanism.resolve(cases.config(attn_mechanism="auto", platform="jax")))
    assert not toy.RAN


def test_check_language_rejects_missing_native_kernels(installed) -> None:
    config = cases.config()
    check_language("attn_mechanism", "flash_attn2", "native", config)
    check_language("attn_mechanism", "auto", "native", config)
    with pytest.raises(ConfigError, match=r"no native kernel on cpu; .*flash_attn2 on cpu"):
        check_language("attn_mechanism", "vanilla", "native", config)
    installed("attention_toy_kernel:NOT_INSTALLED")
    with pytest.raises(ConfigError, match="needs toy-library, which is not installed"):
        check_language("attn_mechanism", "flash_attn2", "native", config)
    cases.run(cases.case_of(CELLS["causal"]), cases.mechanism_of("flash_attn2"))
    assert not toy.RAN


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("attention_toy_kernel:KERNEL", "'toy0'.* cannot be loaded.*repair or uninstall"),
        ("no_such_module:KERNELS", "cannot be loaded: No module named"),
        ("attention_toy_kernel:MISNAMED", "not a mechanism; did you mean 'flash_attn2'"),
        ("attention_toy_kernel:refuses", "it must be a Kernel"),
    ],
)
def test_a_broken_entry_point_is_named(installed, value, message) -> None:
    installed(value)
    with pytest.raises(ConfigError, match=message):
        kernels.kernels()


def test_installed_kernels_precede_built_in_kernels(installed) -> None:
    assert kernels.kernels()[: len(toy.KERNELS)] == toy.KERNELS
    np.testing.assert_equal(kernels.kernels()[len(toy.KERNELS) :], kernels.built_in())
