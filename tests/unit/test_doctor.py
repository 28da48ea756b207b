"""`eco-dist doctor` names the kernel in use and how to get what is missing."""

import importlib.util

import pytest

from eco_dist import doctor
from eco_dist.cli import main


def test_it_names_the_kernel_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {what: value for what, value, _ in doctor.diagnose()}
    assert found["CPU kernel"].startswith("cpu, ")
    monkeypatch.setenv("ECO_DIST_KERNEL", "reference")
    assert {what: value for what, value, _ in doctor.diagnose()}["CPU kernel"] == "reference, plain torch"


def test_it_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    rows = {what: (value, meaning) for what, value, meaning in doctor.diagnose()}
    assert rows["tokenizers"] == ("not installed", "byte-pair tokenizers: pip install 'eco-dist[bpe]'")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "CPU kernel" in capsys.readouterr().out


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECO_DIST_KERNEL", "gpu")
    with pytest.raises(ValueError, match="'cpu', 'triton', 'chunked', 'reference' or unset, got 'gpu'"):
        doctor.diagnose()
