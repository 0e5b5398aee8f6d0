"""Files of arrays are bounded before they are expanded."""

from __future__ import annotations

import io

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.stored import arrays as npz


def test_an_npz_file_that_expands_too_much_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, zeros=np.zeros(100_000, np.uint8), one=np.ones(1))
    assert npz.read_npz(path, "a.npz")["one"].tolist() == [1.0]
    assert npz.read_npz(io.BytesIO(path.read_bytes()), "a.npz")["zeros"].size == 100_000
    monkeypatch.setattr(npz, "MAX_BYTES", 10_000)
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigError, match="expands to"):
        npz.read_npz(path, "a.npz")


def test_a_damaged_npz_file_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"a\.npz is damaged"):
        npz.read_npz(path, "a.npz")
