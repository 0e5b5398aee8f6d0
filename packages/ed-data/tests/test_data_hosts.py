"""Several hosts: each creates and reads only its own rows of the same batches."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.schema import LABELLED, PREFERENCE, TEXT
from ed_data.storage.store import TokenStore

ROWS = {
    TEXT: [f"{i} " + "sheep " * (i % 17) for i in range(90)],
    PREFERENCE: [
        {"prompt": f"{i}?", "chosen": "yes " * (i % 7), "rejected": "no"} for i in range(60)
    ],
    LABELLED: [
        {"prompt": f"{i}?", "completion": "so " * (i % 9 + 1), "label": i % 2} for i in range(60)
    ],
}


def share(index: int, count: int, rows: int = 6) -> range:
    return range(index * rows // count, (index + 1) * rows // count)


def joined(batches) -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def same(first, second) -> bool:
    return all(np.array_equal(first[key], second[key]) for key in {**first, **second})


@pytest.mark.parametrize("schema", list(ROWS), ids=["text", "pairs", "values"])
@pytest.mark.parametrize("how", [{}, {"pack_on_the_fly": True}, {"streaming": True}])
def test_rows_of_all_hosts_form_the_batch(mixture, tokenizer, schema, how):
    """For any number of hosts, which may change between steps, and for any order of rows."""
    options = {"pack_seq_length": 32, **how}
    if schema == TEXT:
        options |= {"pack_tokens": False, "tokenization": {"padding": "longest"}}
    made = mixture(ROWS[schema], **options)

    def fresh():
        return build_loader(made, tokenizer, batch_size=6, seq_length=32, schema=schema)

    whole = fresh()
    state = None
    for count in (1, 2, 3, 6):
        hosts = [fresh().for_rows(share(i, count)) for i in range(count)]
        for host in hosts:
            if state is not None:
                host.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(3):
            assert same(joined([next(host) for host in hosts]), next(whole))
        state = hosts[-1].state_dict()
        assert state == whole.state_dict()
        assert {host.fingerprint for host in hosts} == {whole.fingerprint}
    mixed = fresh().for_rows([5, 0, 2])
    mixed.load_state_dict(json.loads(json.dumps(state)))
    expected = next(whole)
    assert same(next(mixed), {name: values[[5, 0, 2]] for name, values in expected.items()})


def test_host_reads_only_the_tokens_of_its_rows(mixture, tokenizer, monkeypatch):
    read = []
    gather = TokenStore.gather

    def counted(self, documents, starts, counts, column=0):
        read.append(int(counts.sum()))
        return gather(self, documents, starts, counts, column)

    monkeypatch.setattr(TokenStore, "gather", counted)
    loader = build_loader(mixture(ROWS[TEXT]), tokenizer, batch_size=6)
    for index in range(3):
        del read[:]
        batch = loader.for_rows(share(index, 3)).batch_at(2)
        assert sum(read) == (batch["segment_ids"] > 0).sum()


def test_invalid_host_rows_raise_data_error(mixture, tokenizer):
    loader = build_loader(mixture(ROWS[TEXT]), tokenizer, batch_size=6)
    for rows in ([], [6], [-1], [1, 1]):
        with pytest.raises(DataError, match=r"name some of the rows 0 to 5"):
            loader.for_rows(rows)


CODE = """
import hashlib, json, sys
from transformers import AutoTokenizer
from ed_data import Mixture, build_loader
mixture, index, count = Mixture(**json.loads(sys.argv[1])), int(sys.argv[3]), int(sys.argv[4])
loader = build_loader(mixture, AutoTokenizer.from_pretrained(sys.argv[2]), batch_size=6)
own = loader.for_rows(range(index * 6 // count, (index + 1) * 6 // count))
for step in range(4):
    print(hashlib.sha256(own.batch_at(step)["input_ids"].tobytes()).hexdigest())
"""


@pytest.mark.nightly
def test_two_processes_create_the_rows_of_their_share(mixture, tokenizer, tmp_path):
    """Two separate processes use one cache."""
    import hashlib

    tokenizer.save_pretrained(tmp_path / "tok")
    made = mixture(ROWS[TEXT])
    options = made.model_dump(mode="json", exclude_unset=True)
    command = [sys.executable, "-c", CODE, json.dumps(options), str(tmp_path / "tok")]
    running = [
        subprocess.Popen([*command, str(i), "2"], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in running]
    loader = build_loader(made, tokenizer, batch_size=6)
    for index, digests in enumerate(printed):
        expected = [loader.for_rows(share(index, 2)).batch_at(s)["input_ids"] for s in range(4)]
        assert digests == [hashlib.sha256(ids.tobytes()).hexdigest() for ids in expected]
