"""The script and the JSON that docs/deepspeed.md shows, under DeepSpeed's own launcher."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
NO_COMPILING = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'


def block(language: str) -> str:
    text = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_two_ranks_train_and_save(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(block("json"))
    (tmp_path / "script.py").write_text(NO_COMPILING + block("python"))
    launcher = Path(sys.executable).parent / "deepspeed"
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [str(launcher), "--num_gpus", "2", "--master_port", str(free_port()), "script.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    losses = [float(value) for value in re.findall(r"step \d: loss ([\d.]+)", run.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    saved = sorted(path.name for path in (tmp_path / "checkpoint").rglob("*optim_states.pt"))
    assert saved == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
