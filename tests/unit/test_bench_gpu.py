"""The GPU check without a GPU: it says so; what it times runs, here on the CPU; its times are never tested."""

import itertools
import sys
import time

import pytest
import torch

from eco_dist.bench.gpu import __main__ as command
from eco_dist.bench.gpu.contenders import Contender, Size, contenders
from eco_dist.bench.gpu.timing import Measurement, measure
from eco_dist.optim.kernels.reference import ReferenceKernel

pytest.importorskip("triton", reason="triton is Linux-only")
CPU = torch.device("cpu")
TINY = Size(elements=2 * 4096, tensors=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "expected a GPU that torch can use, got none: run this on a machine with one\n"


def test_every_contender_steps_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("torchao", "torchao.optim", "flashoptim", "transformer_engine"):
        monkeypatch.setitem(sys.modules, module, None)  # they compile for half a minute where they are installed
    ticks = itertools.cycle([4.0, 1.0])

    def clock(step) -> float:
        step()
        return next(ticks)

    results = command.time_all(
        ReferenceKernel(), CPU, sizes=[TINY], clock=clock, free_bytes=lambda: 1 << 30, deadline=time.monotonic() + 100
    )
    shapes, timed = results[: 2 * len(command.LAUNCH_SHAPES)], results[2 * len(command.LAUNCH_SHAPES) :]
    assert all(result.reason for result in shapes)  # Triton's code does not run on a CPU
    ours, torchs = timed[: 2 * len(command.TIMED)], timed[2 * len(command.TIMED) :][:3]
    for result in (*ours, *torchs):
        assert (result.milliseconds, result.copy_milliseconds, result.bandwidth_share) == (4.0, 1.0, 0.25), result
    assert all("not installed" in result.reason for result in timed[len(ours) + 3 :])
    assert len(timed) == len(ours) + 3 + 4
    assert capsys.readouterr().out.count("\n") == len(results)


def test_what_does_not_fit_is_not_tried() -> None:
    contender = contenders(ReferenceKernel(), ["fp8"])[0]
    result = measure(contender, Size(elements=1 << 30), CPU, clock=lambda _: 1.0, free_bytes=1 << 30)
    assert result.reason == "needs about 35 GiB, 1 GiB are free"
    assert command.row(result).endswith("- | - | needs about 35 GiB, 1 GiB are free |")


def test_a_package_that_is_missing() -> None:
    def build(size: Size, device: torch.device):
        raise ModuleNotFoundError("No module named 'rival'")

    contender = Contender(name="rival", traffic=1, resident=1, build=build)
    result = measure(contender, TINY, CPU, clock=lambda _: 1.0, free_bytes=1 << 30)
    assert result == Measurement(
        name="rival", elements=8192, tensors=2, reason="not installed (No module named 'rival')"
    )


def test_nothing_is_begun_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"clock": lambda _: 1.0, "free_bytes": lambda: 1 << 30, "deadline": time.monotonic() - 1}
    assert command.time_all(ReferenceKernel(), CPU, sizes=[TINY], **options) == []
    assert "out of time" in capsys.readouterr().out


class OffByOne(ReferenceKernel):
    """Steps right, but moves a bit of one scale."""

    def step(self, tasks, seed, stats) -> None:
        super().step(tasks, seed, stats)
        for task in tasks:
            if task.shard.scales.numel() > 1:
                task.shard.scales.view(torch.int32)[..., -1:, :1] += 1


def test_the_check_counts_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", [((3, 300), torch.float32)])
    assert command.check(ReferenceKernel(), CPU) == {}
    found = command.check(OffByOne(), CPU)
    # One scale is fused into a whole tensor's step only after the next one, and BF16 has none.
    assert len(found) >= len(command.CHECKED) - 3
    assert all(counts.get("scales", 0) >= 1 for counts in found.values())
