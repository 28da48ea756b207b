"""DeepSpeed's launcher over ssh, by pdsh, between two hosts: two network namespaces, each with its own sshd.

Needs root, and pdsh, sshd and ip (Debian: pdsh, openssh-server, iproute2): run with -m slow.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.test_launchers import ROOT, command_of, dry_run, settings

PROGRAMS = ("pdsh", "sshd", "ip", "ssh-keygen", "unshare")
PORT = "2299"
SEARCH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])


def missing() -> str:
    """What this machine lacks for it."""
    lacks = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if os.geteuid() != 0:
        lacks.append("root")
    if not lacks and subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False).returncode:
        lacks.append("permission to make network namespaces")
    return ", ".join(lacks)


class Hosts(NamedTuple):
    """Names of the namespaces, their addresses, and the folder with their keys."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    folder: Path


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def start_sshd(name: str, address: str, folder: Path) -> "subprocess.Popen[bytes]":
    sshd = shutil.which("sshd", path=SEARCH)
    options = {
        "ListenAddress": address,
        "AuthorizedKeysFile": folder / "id.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    command = f"hostname {name}; exec {sshd} -D -f /dev/null -p {PORT} -h {folder}/host -E {folder}/{name}.log"
    command += "".join(f" -o {key}={value}" for key, value in options.items())
    return subprocess.Popen(["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", command])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts with a cable between them."""
    lacks = missing()
    if lacks:
        pytest.skip(f"pdsh between two hosts was not tried: this machine lacks {lacks}")
    names, addresses = (f"eco-a{os.getpid()}", f"eco-b{os.getpid()}"), ("10.77.0.1", "10.77.0.2")
    for key in ("id", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    servers = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            servers.append(start_sshd(name, address, tmp_path))
        yield Hosts(names, addresses, tmp_path)
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_two_hosts_train(hosts: Hosts, tmp_path: Path) -> None:
    hostfile, log = tmp_path / "hostfile", tmp_path / "log"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in hosts.addresses))
    # What the other host's ranks find in their environment: DeepSpeed reads it from the folder that it is started in.
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n")
    arguments = settings(tmp_path / "run", "run.steps=4", "engine=deepspeed", "zero=2")
    command = command_of(dry_run("deepspeed.sh", *arguments, HOSTFILE=str(hostfile), MASTER_PORT="29902"))
    # The key and the port of this test's sshd; a user's ssh has its own.
    command[1:1] = ["--ssh_port", PORT, "--no_ssh_check"]
    keys = f"-i {hosts.folder}/id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    environment = os.environ | {
        "PATH": SEARCH,
        "PYTHONPATH": str(ROOT),
        "PDSH_SSH_ARGS_APPEND": keys,
        "DS_ACCELERATOR": "cpu",
        "DS_ENV_FILE": str(tmp_path / ".deepspeed_env"),
    }
    with log.open("w") as output:
        run = subprocess.Popen(
            ["ip", "netns", "exec", hosts.names[0], *command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert run.wait(timeout=250) == 0, log.read_text()
        finally:
            if run.poll() is None:  # by SIGKILL: DeepSpeed answers to others with pkill on all hosts
                os.killpg(run.pid, signal.SIGKILL)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["engine"]) == (2, "zero2")
    for name in hosts.names:
        assert "Accepted publickey" in (tmp_path / f"{name}.log").read_text()
