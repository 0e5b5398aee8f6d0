"""Fuzzers of readers and routes: ten minutes each at night, and their seeds in the default run.

`EASYDEL_FUZZ_SECONDS` sets the seconds of each fuzzer of the nightly run, and `EASYDEL_FUZZ_SEED`
its random numbers. A finding is stored in the folder `EASYDEL_FUZZ_FINDINGS`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.security.fuzz.mutations import mutate_bytes, mutate_json, write_json
from tests.security.fuzz.readers import CTranslate2, DataFiles, MediaRows, RunFiles, Vocabulary
from tests.security.fuzz.routes import Batches, Images, Mcp, Ollama, Recordings, Responses
from tests.security.fuzz.targets import Finding, Target, fuzz

SECONDS = float(os.environ.get("EASYDEL_FUZZ_SECONDS", "600"))
SEED = int(os.environ.get("EASYDEL_FUZZ_SEED", "0"))
TARGETS = {
    kind.name: kind
    for kind in (
        *(Responses, Mcp, Ollama, Batches, Images, Recordings),
        *(Vocabulary, RunFiles, MediaRows, DataFiles, CTranslate2),
    )
}
LIBRARIES = {"mcp": "mcp", "images": "PIL", "audio": "soundfile", "gguf_vocabulary": "gguf"}


def build(name: str) -> Target:
    """Return a target, or skip the test without the library of the target."""
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    return TARGETS[name]()


@pytest.mark.daily("media_rows")
@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_a_few_mutations_have_allowed_outcomes(name: str, tmp_path: Path) -> None:
    target = build(name)
    summary = fuzz(target, tmp_path, 1.0)
    assert summary.cases >= len(target.load_seeds())
    assert len(summary.outcomes) > 1


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzer_has_no_finding(name: str, tmp_path: Path, record_property) -> None:
    summary = fuzz(build(name), tmp_path, SECONDS, SEED)
    text = f"{name}: {summary.cases} cases, {len(summary.outcomes)} outcomes in {SECONDS:g} s"
    print(text)
    record_property("summary", text)


class Fragile(Target):
    """A reader with a fault, which only mutations of an accepted case reach."""

    name = "fragile"

    def load_seeds(self) -> list[bytes]:
        return [b"abcd"]

    def mutate(self, rng, corpus):
        return mutate_bytes(rng.choice(corpus), rng)

    def execute(self, case: bytes) -> str:
        if b"bc" not in case:
            raise ZeroDivisionError
        return "read"


def test_fuzzer_stores_the_case_of_a_finding(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EASYDEL_FUZZ_FINDINGS", str(tmp_path / "stored"))
    with pytest.raises(Finding, match="ZeroDivisionError"):
        fuzz(Fragile(), tmp_path, 30.0)
    (stored,) = (tmp_path / "stored").iterdir()
    assert b"bc" not in stored.read_bytes()


def test_mutations_repeat_with_their_seed_and_differ() -> None:
    value = {"messages": [{"role": "user", "content": "hello"}], "n": 1}
    first = [write_json(mutate_json(value, rng), rng) for rng in map(random.Random, range(200))]
    again = [write_json(mutate_json(value, rng), rng) for rng in map(random.Random, range(200))]
    assert first == again
    assert len(set(first)) > 100
    assert value == {"messages": [{"role": "user", "content": "hello"}], "n": 1}
