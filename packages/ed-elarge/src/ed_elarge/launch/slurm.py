"""SLURM: a job script that saves a checkpoint before its time limit and queues itself again."""

from __future__ import annotations

import shlex
import subprocess

from ed_infra.errors import ConfigError

from ed_elarge.launch.launched_run import LaunchedRun

#: Seconds between the signal and the time limit, in which the run saves a checkpoint.
_WARNING = 120

_SCRIPT = """\
#!/bin/bash
{header}

set -e
cd {directory}
{setup}
{choice}
set +e

# The run saves a checkpoint when SIGTERM reaches its processes. SLURM sends USR1 to this script
# before the time limit, and TERM when another job takes the nodes. The next start of the job
# continues the run.
again=0
stop() {{ again=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID"; }}
trap stop USR1 TERM

srun --kill-on-bad-exit=1 "${{run[@]}}" &
step=$!
wait "$step"
code=$?
# A signal ends `wait` before the run ends.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

if [ "$again" = 1 ] && [ "$code" = 0 ]; then
  echo "the run was stopped and saved; the job is queued again"
  scontrol requeue "$SLURM_JOB_ID" 2>/dev/null || true
fi
exit "$code"
"""


def render(job: LaunchedRun) -> str:
    """Return the script for `sbatch`.

    Options of the launcher replace the defaults of the same name; an option without a value is a
    flag.
    """
    sweeps = len(job.points) > 1
    log = "slurm-%A_%a.log" if sweeps else "slurm-%j.log"
    header = {
        "job-name": job.name,
        "nodes": str(job.hosts or 1),
        "ntasks-per-node": str(job.processes),
        "output": f"{job.name}-{log}",
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_WARNING}",
    }
    if sweeps:
        header["array"] = f"0-{len(job.points) - 1}"
    header.update(job.options)
    lines = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in header.items()]
    if sweeps:
        cases = [f"  {n}) run=({job.command(point)}) ;;" for n, point in enumerate(job.points)]
        choice = "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])
    else:
        choice = f"run=({job.command(job.points[0])})"
    return _SCRIPT.format(
        header="\n".join(lines),
        directory=shlex.quote(str(job.directory)),
        setup="\n".join(job.setup),
        choice=choice,
    )


def start(job: LaunchedRun) -> int:
    """Submit the script; print the number of the job and return the exit code of `sbatch`.

    Raises:
        ConfigError: This machine has no `sbatch`.
    """
    try:
        done = subprocess.run(
            ["sbatch"], input=render(job), text=True, cwd=job.directory, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "there is no program sbatch: run this command on a login node of the cluster, or "
            "write the script with --dry-run"
        ) from None
    return done.returncode
