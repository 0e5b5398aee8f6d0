"""A second start neither traces nor compiles, and computes the same tokens."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import threading
import zlib
from typing import Any

import jax
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.runner.functions import Functions
from ed_infra.compilation.cache import compiled_afresh, programs_folder
from ed_infra.compilation.private_files import UntrustedFileError, user_key
from ed_infra.compilation.programs import Loading
from ed_infra.testing import tiny_llama

PROMPTS = [[5, 6, 7], [9], [*range(3, 24)]]
SMALL = {
    "max_num_seqs": 2,
    "max_num_seq_buckets": [2],
    "max_num_batched_tokens": 16,
    "page_size": 8,
    "max_model_len": 64,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache folder as the command line creates it."""
    folder = tmp_path_factory.mktemp("home")
    name = "jax_compilation_cache_dir"
    before, own = jax.config.values[name], os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    jax.config.update(name, str(folder / "easydel" / "jax"))
    try:
        yield programs_folder("engines")
    finally:
        jax.config.update(name, before)
        del os.environ["XDG_CACHE_HOME"]
        if own is not None:
            os.environ["XDG_CACHE_HOME"] = own


def answers(engine):
    """Return the tokens of requests of all kinds."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    other = SamplingParams(seed=3, max_tokens=4, repetition_penalty=1.2, prompt_logprobs=1)
    params = [greedy, other, greedy]
    return [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def small(make_llama):
    return make_llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def first(home, small):
    """The first engine, which compiles its programs."""
    engine = eSurge(small, **SMALL)
    assert engine.loop.runner.num_traces > 0
    return engine


@pytest.mark.nightly
def test_second_start_neither_traces_nor_compiles(first, small):
    engine = eSurge(small, **SMALL)
    runner = engine.loop.runner
    pages = jax.tree.leaves(runner.memory.cache)
    assert answers(engine) == answers(first)
    assert runner.num_traces == 0
    assert all(leaf.is_deleted() for leaf in pages), "pages are donated"
    assert {*first.loop.runner.functions._made} == {
        *runner.functions.missing(),
        *runner.functions._made,
    }


def test_only_programs_without_a_file_are_compiled(first, small):
    files = first.loop.runner.functions._kept.folder
    removed = next(files.glob("sample*"))
    content = removed.read_bytes()
    removed.unlink()
    engine = eSurge(small, **SMALL)
    assert engine.loop.runner.num_traces == 1
    assert answers(engine) == answers(first)
    assert removed.exists()
    removed.write_bytes(content)


@pytest.mark.nightly
def test_programs_for_the_first_answer_are_stored_until_faster_ones_are_compiled(
    home, make_llama, monkeypatch
):
    """An engine that ended early, and an engine that starts after it."""
    model, stopped = make_llama(num_hidden_layers=1, rms_norm_eps=1e-4), threading.Event()
    compile_one = Functions._compile_one

    def stopping(functions, name):
        function = compile_one(functions, name)
        if not stopped.is_set():
            stopped.set()
            functions.background.stop(wait=False)
        return function

    monkeypatch.setattr(Functions, "_compile_one", stopping)
    early = eSurge(model, compile_in_background=True, **SMALL)
    expected = answers(early)
    early.terminate()
    assert (
        len(early.loop.runner.functions._kept.filter_stored(early.loop.runner.buckets.shapes)) <= 1
    )
    later = eSurge(model, compile_in_background=True, **SMALL)
    assert later.loop.runner.num_traces == 0
    assert answers(later) == expected
    later.terminate()


@pytest.mark.nightly
def test_lazily_compiled_engine_loads_stored_programs(first, small):
    engine = eSurge(small, compile_runner=False, **SMALL)
    assert answers(engine) == answers(first)
    assert engine.loop.runner.num_traces == 0


@pytest.mark.nightly
@pytest.mark.parametrize("change", [{"max_logprobs": 3}, {"page_size": 16}, {"max_num_seqs": 1}])
def test_changed_options_use_other_programs(first, small, change):
    engine = eSurge(small, compile_runner=False, **{**SMALL, **change})
    runner: Any = engine.loop.runner
    assert runner.functions._loading is None
    assert runner.functions._kept.folder != first.loop.runner.functions._kept.folder


@pytest.mark.nightly
def test_changed_model_uses_other_programs(first, make_llama):
    engine = eSurge(
        make_llama(num_hidden_layers=1, rms_norm_eps=1e-3), compile_runner=False, **SMALL
    )
    assert engine.loop.runner.functions._loading is None


@pytest.mark.nightly
def test_damaged_program_file_is_not_read(first, small):
    kept = first.loop.runner.functions._kept
    file = next(kept.folder.glob("StepShape*"))
    whole = file.read_bytes()
    try:
        for content in (whole[:-100], whole[:9999] + b"?" + whole[10000:], b""):
            file.write_bytes(content)
            assert kept.loading(first.loop.runner.buckets.shapes) is None
    finally:
        file.write_bytes(whole)


def test_program_file_writable_by_others_is_not_read(first, monkeypatch):
    kept, shapes = first.loop.runner.functions._kept, first.loop.runner.buckets.shapes
    file = next(kept.folder.glob("StepShape*"))
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for path, mode in ((file, 0o600), (kept.folder, 0o700)):
        path.chmod(mode | 0o020)
        assert kept.loading(shapes) is None
        path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kept.loading(shapes) is None
    monkeypatch.undo()
    kept.loading(shapes).close()


def test_program_file_without_authentication_code_is_not_unpickled(first):
    kept, shapes = first.loop.runner.functions._kept, first.loop.runner.buckets.shapes
    file = next(kept.folder.glob("StepShape*"))
    whole = file.read_bytes()
    stranger = type(kept)(kept.folder, kept._devices, b"another key")
    try:
        file.write_bytes(stranger._code(file, whole[32:]) + whole[32:])
        assert kept.loading(shapes) is None
        file.write_bytes(zlib.crc32(whole[32:]).to_bytes(4, "big") + whole[32:])
        assert kept.loading(shapes) is None
    finally:
        file.write_bytes(whole)


def test_key_of_the_user_is_private_and_created_once(tmp_path):
    key = user_key(tmp_path)
    assert (len(key), user_key(tmp_path)) == (32, key)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UntrustedFileError, match="chmod"):
        user_key(tmp_path)


@pytest.mark.nightly
def test_unloadable_programs_are_compiled_and_not_stored(first, small, monkeypatch):
    engine = eSurge(small, compile_runner=False, **{**SMALL, "max_logprobs": 2})
    runner: Any = engine.loop.runner

    def broken(content):
        raise RuntimeError("no such function")

    runner.functions._loading = Loading(dict.fromkeys(runner.buckets.shapes, b""), broken)
    assert answers(engine) == answers(first)
    assert runner.num_traces > 0
    assert not runner.functions._kept.usable
    again = eSurge(small, compile_runner=False, **{**SMALL, "max_logprobs": 2})
    assert again.loop.runner.functions._kept is None


@pytest.mark.nightly
def test_unwritable_program_folder_is_ignored(first, tmp_path):
    kept = first.loop.runner.functions._kept
    (tmp_path / "file").write_text("")
    other = type(kept)(tmp_path / "file" / "folder", kept._devices, kept._key)
    other.write(dict(first.loop.runner.functions._made))
    assert other.loading(first.loop.runner.buckets.shapes) is None


def test_each_function_is_loaded_exactly_once():
    loaded: list[bytes] = []
    loading = Loading({i: bytes([i]) for i in range(50)}, lambda c: loaded.append(c) or len)
    assert [loading.take(i) for i in reversed(range(50))] == [len] * 50
    loading.close()
    assert sorted(loaded) == [bytes([i]) for i in range(50)]
    assert 3 not in loading


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 4])
def test_stored_programs_compute_the_same_in_another_process(tmp_path, devices):
    """Also if jax's cache has the programs, because a program from that cache lacks its code."""
    fields = {k: v for k, v in tiny_llama(vocab_size=260).items() if k != "model_type"}
    code = f"""
        from ed_infra.compilation.cache import keep_compiled_programs
        keep_compiled_programs()
        from ed_esurge import SamplingParams, eSurge
        from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(**{fields!r}, sharding_axis_dims=(1, 1, 1, -1, 1))
        engine = eSurge(LlamaForCausalLM.create(config, seed=1), **{SMALL!r})
        params = SamplingParams(temperature=0, max_tokens=6)
        outputs = engine.generate({PROMPTS!r}, params)
        print([o.outputs[0].token_ids for o in outputs], engine.loop.runner.num_traces)
    """
    names = ("XLA_FLAGS", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment |= dict(zip(names, (flags, str(tmp_path)), strict=True), JAX_PLATFORMS="cpu")

    def run():
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        tokens, _, traces = done.stdout.strip().rpartition(" ")
        return tokens, int(traces)

    tokens, traces = run()
    assert traces > 0
    assert run() == (tokens, 0)
    for file in (tmp_path / "easydel" / "engines").glob("*/*"):
        file.unlink()
    assert run() == (tokens, traces)  # jax's cache contains some programs now
    assert run() == (tokens, 0)


def test_compiled_afresh_disables_and_restores_the_cache(home):
    with compiled_afresh():
        assert jax.config.values["jax_enable_compilation_cache"] is False
    assert jax.config.values["jax_enable_compilation_cache"] is True
