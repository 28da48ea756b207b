"""Every configuration that is shipped could start on the ranks it is meant for, as far as one process can tell."""

from pathlib import Path

import pytest
import torch.distributed as dist

from eco_dist.cli import main
from eco_dist.training import load_config
from eco_dist.training.batch import BatchSplit, split_batch
from eco_dist.training.dry_run import dry_run

PAPER = ("30m", "50m", "100m", "200m", "430m", "800m")


def config_of(name: str) -> Path:
    return Path(f"configs/{name}.yaml")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("quickstart", 2),
        ("smoe-tiny", 2),
        ("smoe-2.1B", 8),
        *((f"paper-{size}", 8) for size in PAPER),
        ("paper-30m", 64),
        ("paper-800m", 64),
        ("paper-30m", 512),
        ("paper-800m", 512),
    ],
)
def test_a_shipped_configuration_is_accepted(name: str, world: int) -> None:
    config = load_config(config_of(name))
    checked = dry_run(config, world)
    assert checked.split.micro * checked.split.accumulate * world == config.data.batch
    assert len(checked.planned.ranks) == world
    assert not dist.is_initialized()


def test_every_file_is_walked() -> None:
    walked = {"quickstart", "smoe-tiny", "smoe-2.1B", *(f"paper-{size}" for size in PAPER)}
    # It starts from the weights of a run.
    assert {file.stem for file in Path("configs").glob("*.yaml")} - walked == {"finetune-tiny"}


@pytest.mark.parametrize(
    ("world", "expected"),
    [(1, (16, 32)), (8, (16, 4)), (64, (8, 1)), (512, (1, 1)), (2, (16, 16))],
)
def test_a_batch_is_accumulated_in_as_few_parts_as_fit(world: int, expected: tuple[int, int]) -> None:
    split = split_batch(load_config(config_of("paper-800m")), world)
    assert split == BatchSplit(micro=expected[0], accumulate=expected[1])


def test_an_uneven_share_is_cut_evenly() -> None:
    config = load_config(None, ["data.batch=18", "data.micro_batch=4"])
    assert split_batch(config, 1) == BatchSplit(micro=3, accumulate=6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/quickstart.yaml", "--ranks", "3"], "expected 2 ranks (engine.ranks), got 3"),
        (["--config", "configs/paper-30m.yaml", "--ranks", "7"], "expected data.batch divisible by"),
        (["model.init_from=nothing.safetensors"], "expected a safetensors file"),
        (["data.micro_batch=2", "run.accumulate=2"], "expected data.micro_batch or run.accumulate"),
        (["engine=fsdp2", "zero=3"], "expected engine.zero for engine.name=deepspeed alone"),
        (["engine=deepspeed", "engine.compute=fp32"], "expected engine.compute=bf16 for engine.name=deepspeed"),
        (["engine=deepspeed", "optimizer=sgd", "recipe=fp32-master"], "expected optimizer=adamw"),
    ],
)
def test_what_could_not_start_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--config", "configs/paper-800m.yaml", "--ranks", "64"]) == 0
    said = capsys.readouterr().out
    assert "512 sequences of 512 tokens = 64 (ranks) x 1 (accumulated) x 8 (at a time)" in said
    assert "fsdp2 on 64 ranks" in said
