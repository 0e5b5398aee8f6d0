"""Equal fingerprints mean equal programs: whatever a program follows from changes the name."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.compilation import cache as compile_cache
from ed_infra.compilation.fingerprint import NoFingerprintError, fingerprint, source_hash


@dataclass
class Options:
    width: int = 3
    names: tuple[object, ...] = ("a",)


class Color(Enum):
    RED = 1
    BLUE = 2


def closed(number):
    return lambda x: x + number


IMPORTED = time.time()


def name(*values):
    return fingerprint(*values, imported=IMPORTED)


DIFFERENT = [
    (1, 2),
    (1, 1.0),
    (1, True),
    ("1", 1),
    ((1, 2), (2, 1)),
    (((1,), 2), ((1, 2),)),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (Options(), Options(width=4)),
    (Options(), Options(names=("b",))),
    (Color.RED, Color.BLUE),
    (closed(1), closed(2)),
    (functools.partial(closed, 1), functools.partial(closed, 2)),
    (np.arange(3), np.arange(1, 4)),
    (np.zeros(2, np.float32), np.zeros(2, np.int32)),
    (np.dtype("int8"), np.dtype("int16")),
    (jax.ShapeDtypeStruct((2,), "int8"), jax.ShapeDtypeStruct((3,), "int8")),
    (jax.sharding.PartitionSpec("tp"), jax.sharding.PartitionSpec("dp")),
    (jax.tree.structure((1, 2)), jax.tree.structure([1, 2])),
    (Options, Color),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: repr(pair)[:40])
def test_another_value_has_another_name(pair):
    first, second = pair
    assert name(first) == name(first)
    assert name(first) != name(second)


def test_an_object_that_contains_itself_ends():
    own = Options()
    own.names = (own,)
    assert name(own) == name(own)


@pytest.mark.parametrize("value", [object(), iter(()), np.array([object()])])
def test_a_value_without_a_description_has_no_name(value):
    with pytest.raises(NoFingerprintError):
        name(value)


def test_the_sources_of_classes_count(tmp_path, monkeypatch):
    names = []
    for number in range(2):
        folder = tmp_path / str(number) / "own_package"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("class Own:\n    pass\n")
        (folder / "other.py").write_text(f"RATE = {number}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            patch.delitem(sys.modules, "own_package", raising=False)
            own = __import__("own_package").Own
            source_hash.cache_clear()
            names.append(fingerprint(own, imported=time.time()))
            with pytest.raises(NoFingerprintError, match="after this process began"):
                fingerprint(own, imported=time.time() - 3600)
    assert names[0] != names[1]


def test_fingerprint_changes_with_jax_settings():
    before = name(1)
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert name(1) != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert name(1) == before


@pytest.mark.nightly
def test_every_process_gives_the_same_name():
    code = (
        "from ed_infra.compilation.fingerprint import fingerprint\n"
        "from ed_infra.config.frozen import FrozenDict\n"
        "import ed_infra.masks as masks\n"
        "print(fingerprint({'a', 'b', 'c'}, FrozenDict(x=1), masks, imported=4e9))"
    )
    run = functools.partial(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert len({run().stdout for _ in range(2)}) == 1


def test_engine_programs_are_not_stored_next_to_user_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert compile_cache.programs_folder("engines") is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "easydel" / "jax"))
        assert compile_cache.programs_folder("engines") == tmp_path / "easydel" / "engines"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_inside_compiled_afresh_jaxs_cache_is_neither_read_nor_written(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    before = {
        key: jax.config.values[key]
        for key in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_enable_compilation_cache",
        )
    }
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    try:
        with compile_cache.compiled_afresh():
            jax.jit(lambda x: x * 41).lower(jnp.ones(3)).compile()
        assert not list(tmp_path.glob("*-cache"))
        jax.jit(lambda x: x * 43).lower(jnp.ones(3)).compile()
        assert list(tmp_path.glob("*-cache"))
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
