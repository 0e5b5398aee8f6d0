"""Packing: what one segment, or padding, holds changes nothing in another; bit for bit."""

from __future__ import annotations

from dataclasses import replace

import attention_cases as cases
import attention_pages as pages
import numpy as np
import pytest
from attention_cases import CELLS
from attention_reference import Case
from ed_layers.attention import MECHANISMS

# Products of it are finite in float32, so that the segment which holds it has numbers, too.
HUGE = 1e15
NIGHTLY = ("causal", "bidirectional", "cross", "window+sinks", "chunk", "bias", "everything")


def every_cell(names: list[str]) -> list:
    """The usual cell of each mechanism; others that it carries out are nightly."""
    found = []
    for name in names:
        usual = cases.usual_cell(name)
        found.append(pytest.param(name, usual, id=f"{name}-{usual}"))
        more = [cell for cell in NIGHTLY if cell in cases.declared(name) and cell != usual]
        marks = pytest.mark.nightly
        found += [pytest.param(name, cell, id=f"{name}-{cell}", marks=marks) for cell in more]
    return found


def segments_of(case: Case, tensor: str) -> np.ndarray:
    """Segments along the places of a tensor: those of queries or of keys."""
    return case.mask.q_segments if tensor in ("out", "q") else case.mask.kv_segments


def filled(case: Case, where: tuple[int, int] | None, fill: float | None) -> Case:
    """The case with other numbers in q, k and v of a (row, segment), or of all padding."""
    draw, arrays = np.random.default_rng(5), {}
    for tensor in ("q", "k", "v"):
        segments = segments_of(case, tensor)
        chosen = segments == (0 if where is None else where[1])
        if where is not None:
            chosen &= np.arange(len(segments))[:, None] == where[0]
        x = getattr(case, tensor)
        other = draw.normal(size=x.shape) if fill is None else np.sign(x) * fill
        arrays[tensor] = np.where(chosen[..., None, None], other, x).astype(np.float32)
    return replace(case, **arrays)


@pytest.mark.parametrize(("name", "cell"), every_cell(cases.readers("projected")))
@pytest.mark.daily("cudnn-bidirectional+window")
def test_a_segment_changes_nothing_in_another(name, cell) -> None:
    case, row, segment = cases.case_of(CELLS[cell]), 0, 2
    mechanism, d_out = cases.mechanism_of(name, CELLS[cell].features), cases.noise(case)
    before = cases.run(case, mechanism, d_out)
    for fill in (None, HUGE):
        after = cases.run(filled(case, (row, segment), fill), mechanism, d_out)
        for tensor in ("out", "q", "k", "v"):
            inside = segments_of(case, tensor) == segment
            inside[np.arange(len(inside)) != row] = False
            np.testing.assert_array_equal(after[tensor][~inside], before[tensor][~inside], tensor)
            if fill is None:
                assert (after[tensor][inside] != before[tensor][inside]).mean() > 0.5, tensor


@pytest.mark.parametrize(("name", "cell"), every_cell(cases.readers("projected")))
@pytest.mark.daily("vanilla-everything", "blocksparse-*")
def test_padding_gets_zeros_and_changes_nothing(name, cell) -> None:
    case = cases.case_of(CELLS[cell])
    mechanism, d_out = cases.mechanism_of(name, CELLS[cell].features), cases.noise(case)
    before = cases.run(case, mechanism, d_out)
    for fill in (HUGE, np.inf, np.nan):
        after = cases.run(filled(case, None, fill), mechanism, d_out)
        for tensor, value in before.items():
            np.testing.assert_array_equal(after[tensor], value, tensor)
    for tensor in ("out", "q", "k", "v"):
        padding = segments_of(case, tensor) == 0
        assert padding.any()
        assert not before[tensor][padding].any(), tensor


@pytest.mark.daily("vanilla")
@pytest.mark.parametrize("name", [*cases.readers("cache"), "vanilla", "blockwise"])
def test_empty_slots_and_other_rows_change_nothing(name) -> None:
    cell = "window+sinks"
    case = cases.decode_case(CELLS[cell])
    config = cases.config(decode_attn_mechanism=name)
    mechanism = cases.Mechanism.resolve(config, features=CELLS[cell].features)
    before = cases.run(case, mechanism, cached=True)["out"]
    after = cases.run(filled(case, None, HUGE), mechanism, cached=True)["out"]
    np.testing.assert_array_equal(after, before)
    other = filled(filled(case, (1, 1), None), (1, 1), HUGE)
    after = cases.run(other, mechanism, cached=True)["out"]
    np.testing.assert_array_equal(after[0], before[0])
    assert (after[1] != before[1]).mean() > 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.readers("pages"))
def test_a_sequence_changes_nothing_in_another(name) -> None:
    cell = CELLS[cases.usual_cell(name)]
    case, mechanism = pages.case_of(cell), cases.mechanism_of(name, cell.features)
    before = pages.run(case, mechanism)
    np.testing.assert_array_equal(pages.run(case, mechanism, fill=HUGE), before)
    for segment in np.unique(case.mask.q_segments):
        after = pages.run(filled(case, (0, segment), HUGE), mechanism)
        inside = case.mask.q_segments == segment
        np.testing.assert_array_equal(after[~inside], before[~inside])
        assert (after[inside] != before[inside]).mean() > 0.5


def test_every_mechanism_is_in_here() -> None:
    assert set(cases.readers("projected", "cache", "pages")) == set(MECHANISMS)
