"""What README and docs show is what happens: their code blocks run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>python|bash)\n(?P<code>.*?)```", re.DOTALL)
NOT_RUN = "<!-- not run by the tests: "


def blocks() -> list[object]:
    found = []
    for document in DOCUMENTS:
        for number, match in enumerate(BLOCK.finditer(document.read_text(encoding="utf-8"))):
            if not match["before"].startswith(NOT_RUN):
                name = f"{document.name}-{number}"
                found.append(pytest.param(match["language"], match["code"], id=name))
    return found


@pytest.mark.parametrize(("language", "code"), blocks())
def test_code_block_runs(language: str, code: str, tmp_path: Path) -> None:
    """Python blocks run as torchrun would start them, in a world of one; bash blocks as typed, in the repository."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    if language == "python":
        command, directory = [sys.executable, "-c", code], tmp_path
        environment |= world
    else:
        command, directory = ["bash", "-euo", "pipefail", "-c", code], ROOT
    run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr


def test_documents_have_blocks_that_run() -> None:
    assert len(blocks()) >= 4


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
