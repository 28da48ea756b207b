"""Launching for real: two nodes of torchrun and of DeepSpeed's launcher, a node that is killed, nodes that differ."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


def dry_run(launcher: str, *arguments: str, **environment: str) -> str:
    """What a launcher says it would do."""
    command = ["bash", f"launchers/{launcher}", "--dry-run", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return run.stdout


def command_of(output: str) -> list[str]:
    return shlex.split(output.splitlines()[-1])


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a launcher in a process group of its own; whatever is left of it is killed at the end."""
    running: list[subprocess.Popen[str]] = []

    def begin(command: list[str]) -> "subprocess.Popen[str]":
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def settings(directory: Path, *more: str) -> list[str]:
    text = f"data.path={ROOT / 'README.md'}"
    options = ("model=nano", text, "run.eval_sequences=16", f"run.directory={directory}", "engine.timeout_s=60")
    return ["configs/quickstart.yaml", *options, *more]


def two_nodes(directory: Path, *more: str, second: tuple[str, ...] = ()) -> list[list[str]]:
    """Commands of two torchrun nodes on this machine."""
    where = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    rest = (more, more + second)
    return [
        command_of(dry_run("torchrun.sh", *settings(directory, *rest[node]), NODE_RANK=str(node), **where))
        for node in range(2)
    ]


def two_deepspeed_nodes(directory: Path, hostfile: Path, *more: str) -> list[list[str]]:
    """Commands of two nodes of DeepSpeed's launcher, without ssh. Two loopback addresses are the nodes."""
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    where = {"HOSTFILE": str(hostfile), "MASTER_PORT": free_port()}
    arguments = settings(directory, "engine=deepspeed", *more)
    return [command_of(dry_run("deepspeed.sh", *arguments, NODE_RANK=str(node), **where)) for node in range(2)]


def test_two_torchrun_nodes_train(start: Start, tmp_path: Path) -> None:
    nodes = [start(command) for command in two_nodes(tmp_path, "run.steps=4")]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert json.loads((tmp_path / "summary.json").read_text())["world_size"] == 2


def test_two_nodes_of_deepspeeds_launcher_train(start: Start, tmp_path: Path) -> None:
    nodes = [
        start(command) for command in two_deepspeed_nodes(tmp_path / "run", tmp_path / "hosts", "zero=3", "run.steps=4")
    ]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["engine"]) == (2, "zero3")
    assert summary["measured_static_bytes"] == summary["planned_static_bytes"]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_killed_node_is_named(launcher: str, start: Start, tmp_path: Path) -> None:
    directory, endless = tmp_path / "run", ("run.steps=100000", "run.log_every=1")
    if launcher == "torchrun":
        commands = two_nodes(directory, *endless)
    else:
        commands = two_deepspeed_nodes(directory, tmp_path / "hosts", "zero=2", *endless)
    first, second = (start(command) for command in commands)
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.2)
    os.kill(second.pid, signal.SIGKILL)  # the launcher alone: its rank notices, and ends too
    output = first.communicate(timeout=100)[0]
    assert first.returncode != 0
    assert "eco-dist: expected all ranks to stay until the end, lost node 1" in output
    assert "its launcher has died" in second.communicate(timeout=60)[0]


def test_nodes_that_differ_are_told_so(start: Start, tmp_path: Path) -> None:
    nodes = [start(command) for command in two_nodes(tmp_path, "run.steps=4", second=("optimizer.lr=0.5",))]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    assert "eco-dist: expected the same configuration on every rank" in outputs[0]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_dry_runs_say_what_runs_where(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# nodes\nalpha slots=8\nbeta slots=8\n")
    said = dry_run("deepspeed.sh", "configs/quickstart.yaml", "recipe=fp8", HOSTFILE=str(hostfile))
    assert "2 nodes" in said
    assert "--master_addr alpha" in " ".join(command_of(said))
    where = {"NNODES": "4", "NODE_RANK": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "alpha"}
    assert "ranks 16 to 23 of 32" in dry_run("torchrun.sh", "configs/quickstart.yaml", **where)
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert "2 nodes (n[1-2]), 16 ranks" in dry_run("slurm.sbatch", "configs/quickstart.yaml", **slurm)
    assert "4 pods" in dry_run("k8s.sh", "configs/quickstart.yaml", NNODES="4", IMAGE="image")


def test_the_kubernetes_objects() -> None:
    environment = os.environ | {"IMAGE": "image:1", "NNODES": "4", "NPROC_PER_NODE": "8", "NAME": "job"}
    command = ["bash", "launchers/k8s.sh", "configs/quickstart.yaml", "data.path=/data/a b", 'run.directory="/runs"']
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    service, job = yaml.safe_load_all(run.stdout)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert job["spec"]["completions"] == 4
    assert container["args"][-2:] == ["data.path=/data/a b", 'run.directory="/runs"']
    assert "--node-rank=$(NODE_RANK)" in container["args"]


def restarts(number: int, *command: str) -> "subprocess.CompletedProcess[str]":
    words = ["bash", "launchers/restart.sh", str(number), *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (7, 3)])
def test_a_run_that_fails_at_once_ends_with_its_exit_code(code: int, starts: int, tmp_path: Path) -> None:
    """What a user has to mend, code 2, is not tried again."""
    run = restarts(2, "bash", "-c", f"echo started >>{tmp_path}/log; exit {code}")
    assert run.returncode == code
    assert (tmp_path / "log").read_text() == "started\n" * starts
    said = [
        "restart.sh: the run ended with exit code 7 and starts again; 1 of 2 restarts are left",
        "restart.sh: the run ended with exit code 7 and starts again; 0 of 2 restarts are left",
        "restart.sh: expected the run to end well, got exit code 7 after 2 restarts, and none is left; look for the "
        "first error above",
    ]
    assert run.stderr.splitlines() == (said if code == 7 else [])


def test_a_run_that_is_ended_from_outside_is_not_restarted(tmp_path: Path) -> None:
    """SIGTERM reaches the run, which may still do something, and its launcher waits for that."""
    run = restarts(
        2, "bash", "-c", f"trap 'echo ended >>{tmp_path}/log; exit 1' TERM; kill $PPID; while :; do wait; done"
    )
    assert run.returncode != 0
    assert (tmp_path / "log").read_text() == "ended\n"
    assert run.stderr == ""


def test_slurms_tasks_are_ranks(tmp_path: Path) -> None:
    """What srun gives every task becomes what torch reads, without Slurm."""
    command = command_of(dry_run("slurm.sbatch", "--max-restarts=1", "configs/quickstart.yaml", "recipe=fp8"))
    assert command[:4] == ["launchers/restart.sh", "1", "srun", "--kill-on-bad-exit=1"]
    first = command.index("python")
    assert command[first:][-2:] == ["run.resume=true", "recipe=fp8"]
    task = {"SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    show = ["bash", "-c", "echo " + " ".join(f"${name}" for name in names)]
    run = subprocess.run(
        [*command[4:first], *show], env=os.environ | task, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["11", "3", "16", "1", "8"]


@pytest.mark.parametrize("launcher", ["torchrun.sh", "deepspeed.sh", "slurm.sbatch", "k8s.sh"])
def test_a_missing_configuration_is_one_sentence(launcher: str) -> None:
    command = ["bash", f"launchers/{launcher}", "configs/nothing.yaml"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "expected an existing configuration file, got 'configs/nothing.yaml'" in run.stderr
