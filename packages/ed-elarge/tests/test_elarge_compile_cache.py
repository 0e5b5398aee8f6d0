"""Compiled programs are stored in the user's cache folder unless the user sets another folder."""

import os

import jax
import pytest
from ed_elarge.actions import execution


@pytest.fixture
def unset(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_run_keeps_programs_in_the_users_cache(unset, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    execution.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "easydel" / "jax")


def test_user_compile_cache_folder_is_kept(unset):
    jax.config.update("jax_compilation_cache_dir", "mine")
    execution.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == "mine"


def test_small_programs_are_kept_too(unset, monkeypatch, tmp_path):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update(name, 1.0)
        execution.keep_compiled_programs()  # the environment of the tests names a time of its own
        assert jax.config.values[name] == 1.0
        monkeypatch.delenv(name.upper())
        jax.config.update("jax_compilation_cache_dir", None)
        execution.keep_compiled_programs()
        assert jax.config.values[name] == 0
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=4"])
def test_simulated_devices_have_threads_to_wait_in(unset, monkeypatch, tmp_path, flags):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    execution.keep_compiled_programs()
    assert os.environ.get("NPROC") == ("64" if flags else None)
    monkeypatch.setenv("NPROC", "3")
    execution.keep_compiled_programs()
    assert os.environ["NPROC"] == "3", "the setting of the user is kept"
