"""A model and its optimizer for `torch.distributed.checkpoint`, as plain tensors that load without this package.

    dcp.async_save(dcp_state(model, optimizer), checkpoint_id=path, process_group=a_group_of_its_own)
    load_dcp(path, model, optimizer)

Names are those of our own format: `NAME` (codes), `NAME_scale`, `NAME.exp_avg`, ... DCP brings no hashes and no atomic
commit; `eco_dist.checkpoint.save` does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eco_dist.checkpoint.collective import agreed
from eco_dist.checkpoint.holders import Holder, holder_of, named_parameters
from eco_dist.checkpoint.manifest import CheckpointError
from eco_dist.checkpoint.pieces import SCALARS, Piece, pieces_of
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.optim import ECOOptimizer, StateKey

SEED = "eco.seed"
STREAM = "stream"


def dcp_state(model: nn.Module, optimizer: ECOOptimizer) -> dict[str, Tensor]:
    """Codes, scales and optimizer state by name; they share the memory of the model and the optimizer.

    Args:
        model: whole, or sharded by FSDP2.
        optimizer: its optimizer; momenta carry part of the weights. Options of its groups are the program's to save.

    Raises:
        TypeError: for the optimizer of a DeepSpeed engine or under FSDP1, whose partitions DCP does not know.
    """
    if not isinstance(optimizer, ECOOptimizer) or isinstance(optimizer, Holder):
        raise TypeError(
            f"expected ECOAdamW or ECOSGD for torch.distributed.checkpoint, got {type(optimizer).__name__}; use "
            "eco_dist.checkpoint.save, which knows the partitions of DeepSpeed and FSDP1"
        )
    holder, parameters = holder_of(optimizer, model), named_parameters(model)
    state: dict[str, Tensor] = {SEED: torch.tensor(optimizer.seed)}
    for name, held in holder.checkpoint_runs(parameters).items():
        for piece in pieces_of(name, held):
            state[piece.name] = _global(piece, parameters[name])
        state.update({f"{name}.{key}": held.state[key] for key in sorted(SCALARS & held.state.keys())})
        if held.stream is not None:
            state[f"{name}.{STREAM}"] = torch.tensor(held.stream)
    return state


def load_dcp(path: Path | str, model: nn.Module, optimizer: ECOOptimizer) -> None:
    """Load what `dcp_state` gave to DCP, on any number of ranks; collective.

    Raises:
        CheckpointError: a tensor is missing or of another shape, dtype or recipe; on all ranks, nothing changed.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    state = dcp_state(model, optimizer)
    agreed(lambda: _check(Path(path), state))
    layouts = {key: value.clone() for key, value in state.items() if key.endswith(f".{StateKey.LAYOUT}")}
    load(layouts, checkpoint_id=path)
    for key, value in layouts.items():
        if float(value) != float(state[key]):
            raise CheckpointError(
                f"expected '{key.removesuffix(f'.{StateKey.LAYOUT}')}' with the optimizer state of the model's recipe, "
                "got another recipe's; convert the model with the recipe of the checkpoint"
            )
    load(state, checkpoint_id=path)
    parameters = named_parameters(model)
    streams = [(p, int(state[key])) for name, p in parameters.items() if (key := f"{name}.{STREAM}") in state]
    holder_of(optimizer, model).checkpoint_loaded(int(state[SEED]), streams)


def write_masters(reader: CheckpointReader, target: Path) -> None:
    """Write a checkpoint as one with fp32 masters and torch's AdamW: keys as `get_state_dict` of them gives.

    The stored weights become the masters; errors that are pending in the first moment stay there and are paid back.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Tensor] = {}
    for name, record in reader.manifest.parameters.items():
        state[f"model.{name}"] = reader.weight(name).float()
        state.update({f"optim.state.{name}.{key}": value for key, value in reader.moments(name).items()})
        if StateKey.STEP in record.scalars:
            state[f"optim.state.{name}.{StateKey.STEP}"] = torch.tensor(record.scalars[StateKey.STEP])
    for name in reader.buffers():
        state[f"model.{name}"] = reader.tensor(name)
    save(state, checkpoint_id=target, no_dist=True)


def _global(piece: Piece, parameter: Tensor) -> Tensor:
    """A piece as a DTensor with its global shape, cut as its parameter is."""
    whole = torch.Size(piece.shape)
    if not isinstance(parameter, DTensor) or (piece.tensor.numel() == whole.numel() == 1):
        return piece.as_stored()
    stride = torch.empty(whole, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(piece.as_stored(), mesh, placements, run_check=False, shape=whole, stride=stride)


def _check(path: Path, state: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, tensor in state.items():
        entry = stored.get(key)
        got = (entry.properties.dtype, entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if got != (tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"expected '{key}' as {tensor.dtype} of shape {list(tensor.shape)} in {path}, got "
                f"{'none' if got is None else f'{got[0]} of shape {list(got[1])}'}; load it into the model, with the "
                "recipe and the optimizer, whose dcp_state was saved"
            )
