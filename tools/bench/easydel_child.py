"""Run a run file in EasyDeL, and write the metrics of its steps as lines of JSON.

`tools.bench.easydel` starts this file with the interpreter of the installed EasyDeL, so the file
imports nothing else of this project.

    python easydel_child.py RUN.yaml METRICS.jsonl
"""

from __future__ import annotations

import json
import pkgutil
import sys
import time


def main(run_file: str, metrics_file: str) -> None:
    """Run the actions of a file, and record each call of the trainer's logging."""
    # Only the other interpreter has these modules.
    run = pkgutil.resolve_name("easydel.scripts.elarge:main")
    trainer_class = pkgutil.resolve_name("easydel.trainers.base_trainer:BaseTrainer")

    log_metrics = trainer_class.log_metrics

    def record(self, metrics, pbar, step, *args, **options):
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                continue
        line = {"step": int(step), "time": time.time(), "metrics": numbers}
        with open(metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return log_metrics(self, metrics, pbar, step, *args, **options)

    trainer_class.log_metrics = record
    run([run_file])


if __name__ == "__main__":
    main(*sys.argv[1:])
