"""multinode.slurm with stand-ins for Slurm: what it starts, and when it asks to be requeued."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "scontrol $*" >> calls; fi
"""
SQUEUE = """#!/usr/bin/env bash
[ "$*" = "--noheader --jobs=42 --format=%T" ] && cat state
"""
SRUN = """#!/usr/bin/env bash
shift 2  # --kill-on-bad-exit, --cpus-per-task
SLURM_NODEID=1 "$@"
"""
TRAINER = """#!/usr/bin/env bash
echo "run_train $NNODES $NODE_RANK $RDZV_ENDPOINT $NGPU $*" >> calls
echo "$RDZV_ID" >> ids
for i in $(seq 3000); do [ -e go ] && break; sleep 0.1; done
exit $(cat code)
"""

STAND_INS = {"scontrol": SCONTROL, "squeue": SQUEUE, "srun": SRUN, "run_train.sh": TRAINER}


@pytest.fixture
def submit(tmp_path: Path):
    """Start the script in a folder with the stand-ins."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(code: int, state: str = "RUNNING") -> subprocess.Popen:
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "state").write_text(f"{state}\n")
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2",
        }  # fmt: skip
        return subprocess.Popen([ROOT / "multinode.slurm", "debug", "--training.steps=5"], env=env)

    return start


@pytest.mark.parametrize("code", [0, 1, 3, 4, 75])
def test_requeues_on_75_alone(submit, tmp_path: Path, code: int) -> None:
    (tmp_path / "go").touch()
    assert submit(code).wait(300) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "run_train 2 1 node7:20042 8 debug --training.steps=5"
    assert calls[1:] == (["scontrol requeue 42"] if code == 75 else [])


def test_a_cancelled_job_stays_cancelled(submit, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    assert submit(75, state="COMPLETING").wait(300) == 75
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_each_job_has_a_random_id_of_its_own(submit, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    for _ in range(2):
        assert submit(0).wait(300) == 0
    one, other = (tmp_path / "ids").read_text().splitlines()
    assert re.fullmatch("[0-9a-f]{32}", one)
    assert one != other


def test_is_for_sbatch() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    run = subprocess.run(
        [ROOT / "multinode.slurm", "debug"], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr == "titanlite: submit this script with sbatch from the folder that has run_train.sh\n"


def test_outlives_the_signals_that_stop_the_trainer(submit, tmp_path: Path) -> None:
    job = submit(75)
    while not (tmp_path / "calls").exists():
        time.sleep(0.05)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job.send_signal(number)
        time.sleep(0.2)
    (tmp_path / "go").touch()
    assert job.wait(300) == 75
    assert "scontrol requeue 42" in (tmp_path / "calls").read_text()
