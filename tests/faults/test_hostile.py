"""Files made to do harm, and checkpoints of the wrong kind whose hashes are right: refused, nothing run or changed."""

import dataclasses
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eco_dist.checkpoint import CheckpointCorruptError, Manifest, load, save
from eco_dist.checkpoint.manifest import MANIFEST, StoredTensor, file_digest
from tests.unit.test_checkpoint import assert_refused, build, train

FILE = "rank-00000.safetensors"


class Bomb:
    """Executed by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, optimizer = build()
    train(model, optimizer, 0, 2)
    return save(tmp_path / "run", model, optimizer, step=2)


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """The manifest with other contents, and hashes that fit."""
    manifest = Manifest.read(folder)
    manifest = dataclasses.replace(manifest, files={FILE: file_digest(folder / FILE)})
    change(manifest).write(folder / MANIFEST)


@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_pickle_is_not_executed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    if name == FILE:
        rewrite(folder, lambda manifest: manifest)
    assert_refused(folder, *build(seed=3), "expected", CheckpointCorruptError)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("length", [1 << 62, 1 << 30, 8])
def test_a_header_that_lies_about_its_length(length: int, folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", length) + content[8:])
    rewrite(folder, lambda manifest: manifest)
    assert_refused(folder, *build(seed=3), FILE, CheckpointCorruptError)


def test_fewer_elements_than_promised(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors["0.weight.exp_avg"] = tensors["0.weight.exp_avg"][:-1].contiguous()
    save_file(tensors, folder / FILE)
    rewrite(folder, lambda manifest: manifest)
    assert_refused(folder, *build(seed=3), "expected 4847 elements of float32", CheckpointCorruptError)


def without(name: str) -> Callable[[Manifest], Manifest]:
    return lambda m: dataclasses.replace(m, tensors={key: value for key, value in m.tensors.items() if key != name})


def in_fp32(manifest: Manifest) -> Manifest:
    tensor = manifest.tensors["0.weight"]
    changed = StoredTensor(shape=tensor.shape, dtype="float32", runs=tensor.runs)
    return dataclasses.replace(manifest, tensors={**manifest.tensors, "0.weight": changed})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("0.weight_scale"), "expected '0.weight_scale' in the checkpoint, got none"),
        (without("0.weight.exp_avg"), "momenta carry part of the weights, so a checkpoint without them"),
        (in_fp32, "expected '0.weight' as float8_e4m3fn of shape .*, got float32"),
    ],
)
def test_the_wrong_kind_is_refused(change: Callable[[Manifest], Manifest], sentence: str, folder: Path) -> None:
    rewrite(folder, change)
    assert_refused(folder, *build(seed=3), sentence)


def test_files_of_a_larger_world_are_not_mixed_in(folder: Path) -> None:
    """What lies beside the files of the manifest is nobody's."""
    expected = load_file(folder / FILE)
    save_file({key: torch.zeros_like(value) for key, value in expected.items()}, folder / "rank-00007.safetensors")
    shutil.copytree(folder, folder.parent / "step-00000009.tmp")
    model, optimizer = build(seed=3)
    assert load(folder.parent, model, optimizer).step == 2
    assert torch.equal(model[0].weight.codes.view(torch.uint8), expected["0.weight"].view(torch.uint8))
    save(folder.parent, model, optimizer, step=3)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["LATEST", "step-00000002", "step-00000003"]
