"""The training program with experts on two ranks of torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_share_the_experts(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number, file in enumerate(sorted((ROOT / "eco_dist").rglob("*.py"))):
        (text / f"{number}.py").write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "eco_dist", "train", "--config", "configs/smoe-tiny.yaml", "model.preset=smoe-nano"]
    command += [f"data.path={text}", "run.steps=12", "run.eval_sequences=8", f"run.directory={tmp_path / 'run'}"]
    command += ["model.expert_wire=fp8", "model.expert_capacity=1.0", "run.save_every=10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["measured_static_bytes"] == summary["planned_static_bytes"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(0.0 < line["dropped_share"] < 0.5 for line in lines)
    assert all(abs(sum(layer) - 1) < 1e-9 for line in lines for layer in line["expert_load"])
    assert any("all_to_all" in name or "alltoall" in name for name in summary["wire_bytes_per_step"][0])
    assert (tmp_path / "run" / "expert_load.png").stat().st_size > 10_000
