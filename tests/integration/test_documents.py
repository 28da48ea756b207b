"""What README and docs show is what happens: their code blocks run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.distributed.ranks import PROCESSES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>python|bash)\n(?P<code>.*?)```", re.DOTALL)
NOT_RUN = "<!-- not run by the tests: "
OURS = re.compile(r"eco-dist [^|&;$<>`\\]*")
"""A command of ours that needs no shell."""


def blocks() -> list[object]:
    found = []
    for document in DOCUMENTS:
        for number, match in enumerate(BLOCK.finditer(document.read_text(encoding="utf-8"))):
            if not match["before"].startswith(NOT_RUN):
                name = f"{document.name}-{number}"
                found.append(pytest.param(match["language"], match["code"], id=name))
    return found


def lines_of(code: str) -> list[str]:
    return code.replace("\\\n", " ").splitlines()


def run_python(code: str) -> None:
    """As torchrun would start it, in a world of one."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})


def run_ours(code: str) -> None:
    """Our commands, one after the other, as the script that pip installs calls them."""
    (script,) = entry_points(group="console_scripts", name="eco-dist")
    main = script.load()
    for line in lines_of(code):
        status = main(shlex.split(line, comments=True)[1:])
        if status:
            sys.exit(status)


def forked(function: Callable[[str], None], code: str, directory: Path, said: Path) -> None:
    """A new process in which torch has been imported already; that is most of what most blocks would take."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(directory)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    function(code)


@pytest.mark.parametrize(("language", "code"), blocks())
def test_code_block_runs(language: str, code: str, tmp_path: Path) -> None:
    """Python blocks run as torchrun would start them, in a world of one; bash blocks as typed, in the repository."""
    if language == "python" or all(map(OURS.fullmatch, lines_of(code))):
        said = tmp_path / "said"
        work = (run_python, code, tmp_path, said) if language == "python" else (run_ours, code, ROOT, said)
        process = PROCESSES.Process(target=forked, args=work)
        process.start()
        process.join(240)
        if process.is_alive():
            process.kill()
        assert process.exitcode == 0, said.read_text()
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr


def test_documents_have_blocks_that_run() -> None:
    assert len(blocks()) >= 4


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
