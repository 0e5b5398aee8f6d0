"""Where the time of a run goes, MFU, trackers, and that a slow sink delays no step."""

from __future__ import annotations

import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from ed_infra.errors import ConfigError
from ed_layers.quantization import quantize
from ed_models.base.flops import count_token_flops
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from ed_trainers import EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.figures import progress
from ed_trainers.figures.flops import PEAKS, known_peak, utilization
from ed_trainers.figures.meter import ACTIVITIES, Meter, peak_memory
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.figures.sinks import Buffered
from ed_trainers.figures.trackers import About, Trackio


@pytest.fixture
def clock(monkeypatch):
    """A clock that only advances on request."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.time)

    def go(seconds):
        now.time += seconds

    return go


def test_meter_separates_waiting_compile_and_productive_seconds(clock):
    meter = Meter()
    clock(4.0)
    meter.ready()
    with meter.fetching(lambda: True):
        clock(1.0)
    with meter.spending("compile"):
        clock(10.0)
    clock(2.0)
    meter.record_step(100)
    row = meter.row()
    assert "tokens_per_second" not in row  # of the first step nothing is said
    assert row["data_wait"] == 1.0 and row["goodput"] == pytest.approx(2 / 17)
    for busy in (False, True):
        with meter.fetching(lambda busy=busy: not busy):
            clock(0.5)
        clock(1.5)
        meter.record_step(60)
    with meter.spending("checkpoint"):
        clock(3.0)
    with meter.spending("evaluation"):
        clock(5.0)
    row = meter.row()
    assert row["tokens_per_second"] == pytest.approx(120 / 4)  # pauses are not in it
    assert row["data_wait"] == pytest.approx(0.25)  # the devices were busy in one of two steps
    assert meter.seconds() == {
        "productive": pytest.approx(29 - 23.5),
        "compile": 10.0,
        "data": 1.5,
        "checkpoint": 3.0,
        "evaluation": 5.0,
        "restart": 4.0,
        "lost": 0.0,
    }
    summary = meter.summary()
    assert summary["goodput"] == pytest.approx(5.5 / 29)
    assert sum(summary[f"{kind}_seconds"] for kind in ("productive", *ACTIVITIES)) == pytest.approx(
        29
    )


def test_memory_is_that_of_the_process_on_a_cpu():
    before = peak_memory()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    assert before is not None and peak_memory() >= before > 1 << 26


def llama(**given):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sharding_axis_dims": (1, 1, 1, 1, 1),
    }
    return LlamaForCausalLM.create(LlamaConfig(**{**sizes, **given}))


def matrix_parameters(state, config):
    flops = count_token_flops(state.graphstate, state.graphother, config)
    return flops.trained, flops.frozen


@pytest.mark.nightly
@pytest.mark.proves("peak_flops_per_device")
def test_utilization_follows_palm_flops_formula():
    model = llama()
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    matrices = 3 * layer + 16 * 32
    assert matrix_parameters(EasyDeLState.create(model=model), model.config) == (matrices, 0)
    counted = utilization(EasyDeLState.create(model=model), model.config, length=10, peak=1e6)
    assert counted.per_token == 6 * matrices + 12 * 3 * 16 * 10
    assert counted.per_token == model.flops_per_token(10, include_backward=True)
    assert counted.of(100.0) == pytest.approx(100 * counted.per_token / 1e6)
    assert f"6 x {matrices:,} parameters that learn + 12 x 48 features" in counted.formula
    frozen = EasyDeLState.create(model=model, trainable=[("o_proj", True)])
    learning = 3 * 16 * 16
    assert matrix_parameters(frozen, model.config) == (learning, matrices - learning)
    # Codes count as their values.
    spec = {"dtype": "nf4", "group_size": 8, "pattern": "q_proj|k_proj"}
    coded = EasyDeLState.create(model=quantize(model, spec))
    few = 3 * (16 * 16 + 16 * 8)
    assert matrix_parameters(coded, model.config) == (matrices - few, few)
    # Unrolled, or with the table as the head, the count is the same.
    leaves = model.to_layout("leaves")
    assert matrix_parameters(EasyDeLState.create(model=leaves), model.config) == (matrices, 0)
    tied = llama(tie_word_embeddings=True)
    assert matrix_parameters(EasyDeLState.create(model=tied), tied.config) == (matrices, 0)
    assert utilization(frozen, model.config, length=10, peak=None) is None  # a CPU


@pytest.mark.nightly
def test_of_experts_a_token_meets_a_few():
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = Qwen3MoeForCausalLM.create(config)
    size = getattr(config, "head_dim", None) or 8
    attention = 2 * 16 * 2 * size + 2 * 16 * size
    layer = attention + 16 * 8 + 2 * 3 * 16 * 20
    found, _ = matrix_parameters(EasyDeLState.create(model=model), config)
    assert found == 2 * layer + 16 * 32


def test_peaks_are_found_by_the_longest_name():
    assert known_peak("TPU v5 lite") == 197e12
    assert known_peak("TPU v5p") == PEAKS["TPU v5"]
    assert known_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert known_peak("cpu") is None


def run(toy, directory, **given):
    settings = {"max_training_steps": 4, "do_last_save": False, "use_tensorboard": False, **given}
    settings = {"log_steps": 1, **settings}
    arguments = SFTArguments(save_directory=str(directory), total_batch_size=8, **settings)
    data = toy.loader(), toy.loader(steps=1, seed=9)
    return SFTTrainer(arguments, toy.model(), *data).train()


def test_rows_and_outcome_say_where_time_went(toy, tmp_path, capsys):
    output = run(toy, tmp_path, peak_flops_per_device=1e9, save_steps=2, evaluation_steps=2)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert all(0 <= row["goodput"] <= 1 and row["data_wait"] >= 0 for row in rows)
    assert all(0.01 < row["peak_memory_gib"] < 1000 for row in rows)
    assert all(row["mfu"] > 0 for row in rows[1:])
    metrics = output.metrics
    for kind in ("compile", "checkpoint", "evaluation", "restart", "productive"):
        assert metrics[f"{kind}_seconds"] > 0, kind
    parts = sum(metrics[f"{kind}_seconds"] for kind in ("productive", *ACTIVITIES))
    assert parts <= metrics["seconds"] + 1e-3
    text = capsys.readouterr().out
    assert text.count("mfu = (6 x 512 parameters that learn) FLOP/token") == 1
    rate = rows[-1]["tokens_per_second"]
    assert rows[-1]["mfu"] == pytest.approx(rate * 6 * 512 / 1e9)


def test_without_a_terminal_there_are_plain_lines(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    run(toy, tmp_path, log_steps=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines if "/" in line] == ["1/4", "2/4", "3/4", "4/4"]
    assert re.fullmatch(r"step 4/4  loss \d\.\d{4}  [\d,]+ tokens/s", lines[-2])
    run(toy, tmp_path / "json", progress_bar_type="json")
    assert "/4  loss" not in capsys.readouterr().out


# --- sinks ---


class Slow:
    """A slow or failing destination."""

    def __init__(self, fails=False):
        self.rows, self.threads, self.fails, self.closed = [], set(), fails, False
        self.may_write = threading.Event()
        self.may_write.set()

    def restart(self, rows):
        self.rows += rows

    def write(self, row):
        self.threads.add(threading.get_ident())
        if self.fails:
            raise OSError("no route to host")
        assert self.may_write.wait(60)
        self.rows.append(row)

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_slow_sink_does_not_delay_training(monkeypatch):
    monkeypatch.setattr("ed_trainers.figures.sinks._INTERVAL", 0.01)
    slow = Slow()
    sink = Buffered(slow, print)
    sink.restart([{"step": 0}])
    slow.may_write.clear()
    for step in range(1, 31):
        sink.write({"step": step})
    assert slow.rows == [{"step": 0}], "no call waited for the sink"
    slow.may_write.set()
    deadline = time.monotonic() + 60
    while len(slow.rows) < 31 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert slow.threads and threading.get_ident() not in slow.threads
    sink.close()
    assert [row["step"] for row in slow.rows] == list(range(31)) and slow.closed


def test_flush_writes_all_buffered_rows():
    sink = Buffered(Slow(), print)
    sink.restart([])
    sink.write({"step": 1})
    sink.flush()
    assert sink._sink.rows == [{"step": 1}]
    sink.close()


def test_a_sink_that_fails_is_let_go_with_one_message():
    said = []
    sink = Buffered(Slow(fails=True), said.append)
    sink.restart([])
    for step in range(3):
        sink.write({"step": step})
        sink.flush()
    sink.close()
    assert said == ["Slow gets no more metrics (no route to host); they are in metrics.jsonl"]


def fake(name, calls):
    """A tracker that records its calls."""

    def note(verb, result=None):
        return lambda *args, **kwargs: calls.append((verb, args, kwargs)) or result

    if name == "wandb":
        run = SimpleNamespace(log=note("log"), finish=note("end"))
        return SimpleNamespace(init=note("begin", run))
    if name == "trackio":
        return SimpleNamespace(init=note("begin"), log=note("log"), finish=note("end"))
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    return SimpleNamespace(
        set_experiment=note("project"),
        start_run=note("begin", run),
        log_params=note("settings"),
        log_metrics=note("log"),
        end_run=note("end"),
    )


@pytest.mark.nightly
@pytest.mark.proves("report_to", "project", "run_name")
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_trackers_get_the_rows_and_resume(toy, tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake(name, calls))
    given = {"report_to": name, "project": "tests", "run_name": "first", "save_steps": 2}
    run(toy, tmp_path, **given)
    verbs = [verb for verb, _, _ in calls]
    assert verbs[-1] == "end" and verbs.count("log") == 5  # four steps and an evaluation
    begin = dict(calls[verbs.index("begin")][2])
    assert "first" in str(begin.values())
    assert "tests" in str(calls[0])
    logged = [(args, kwargs) for verb, args, kwargs in calls if verb == "log"]
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert logged[0][0][0]["train/loss"] == rows[0]["loss"]
    assert [kwargs["step"] for _, kwargs in logged] == [1, 2, 3, 4, 4]
    assert any("eval/loss" in args[0] for args, _ in logged)
    number = (tmp_path / f"{name}.run").read_text()
    calls.clear()
    run(toy, tmp_path, **{**given, "max_training_steps": 6})
    again = dict(calls[[verb for verb, _, _ in calls].index("begin")][2])
    assert number in {str(value) for value in again.values()}
    assert (tmp_path / f"{name}.run").read_text() == number


@pytest.mark.parametrize("space", [None, "org/space"])
def test_trackio_gets_its_space(tmp_path, monkeypatch, space):
    calls = []
    monkeypatch.setitem(sys.modules, "trackio", fake("trackio", calls))
    tracker = Trackio(tmp_path, About("tests", "first", {}, space))
    tracker.begin("first-1")
    assert calls[0][2].get("space_id") == space


def test_missing_tracker_error_states_install_command(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'ed-trainers[wandb]'")):
        run(toy, tmp_path, report_to=["wandb"])
    assert not (tmp_path / "metrics.jsonl").exists()
