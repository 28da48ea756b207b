"""The Slurm script under a real Slurm, one that is there: set ECO_DIST_TEST_SLURM=1 where sbatch reaches it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_launchers import ROOT, settings

VARIABLE = "ECO_DIST_TEST_SLURM"


@pytest.mark.skipif(
    os.environ.get(VARIABLE) != "1", reason=f"not tried: {VARIABLE}=1 submits a job to this machine's Slurm"
)
def test_a_job_of_two_tasks_trains(tmp_path: Path) -> None:
    log, arguments = tmp_path / "log", settings(tmp_path / "run", "run.steps=4", "run.eval_sequences=2")
    command = ["sbatch", "--wait", "--ntasks-per-node=2", f"--output={log}", "launchers/slurm.sbatch", *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr + (log.read_text() if log.exists() else "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
