"""The `main` functions of EasyLM's commands; the work is imported when a command runs."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence

from ed_elarge.easylm.flags import parse_flags
from ed_elarge.exits import run_work

Main = Callable[..., None]

#: Command -> address of its function of the flags.
WORK = {
    "llama_train": "ed_elarge.easylm.training:train_llama",
    "llama_serve": "ed_elarge.easylm.serving:serve_llama",
    "convert_hf_to_easylm": "ed_elarge.easylm.conversions:from_hugging_face",
    "convert_easylm_to_hf": "ed_elarge.easylm.conversions:to_hugging_face",
    "convert_checkpoint": "ed_elarge.easylm.conversions:convert_file",
    "diff_checkpoint": "ed_elarge.easylm.conversions:write_difference",
    "benchmark_attention": "ed_elarge.easylm.measuring:benchmark_attention",
    "lm_eval_harness": "ed_elarge.easylm.measuring:evaluate_tasks",
    "lm_eval_json": "ed_elarge.easylm.json_evaluation:evaluate_file",
}


def run_command(name: str, arguments: Sequence[str] | None = None) -> None:
    """Read the flags of a command, work, and exit."""
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(run_work(lambda: pkgutil.resolve_name(WORK[name])(parse_flags(name, words))))


def _main(name: str) -> Main:
    def main(arguments: Sequence[str] | None = None) -> None:
        run_command(name, arguments)

    return main


llama_train = _main("llama_train")
llama_serve = _main("llama_serve")
convert_hf_to_easylm = _main("convert_hf_to_easylm")
convert_easylm_to_hf = _main("convert_easylm_to_hf")
convert_checkpoint = _main("convert_checkpoint")
diff_checkpoint = _main("diff_checkpoint")
benchmark_attention = _main("benchmark_attention")
lm_eval_harness = _main("lm_eval_harness")
lm_eval_json = _main("lm_eval_json")
