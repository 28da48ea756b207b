"""The model as it was before FSDP: names and shapes of its parameters, and where FSDP has put them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

_HELD_AS = "_eco_dist_originals"


class Originals(nn.Module):
    """The parameters of a model that FSDP1 has wrapped as they were before, without values.

    Whatever asks a model for names and shapes can ask this: `plan_conversion`, or a rule that gives matrices other
    options than vectors, which the flat parameters of `use_orig_params=False` hide.

    Attributes:
        named: its parameters on the meta device, by first name.
    """

    def __init__(self, model: FullyShardedDataParallel) -> None:
        """Look at a wrapped model; see `of`."""
        super().__init__()
        self._wrapped = [model]  # in a list, or it would become a submodule
        self._by_module: dict[int, list[tuple[str, nn.Parameter]]] = {}
        self._by_handle: dict[int, list[nn.Parameter]] = {}
        for handle in handles_of(model):
            self._add(handle)
        self.named = dict(self.named_parameters())

    @classmethod
    def of(cls, model: FullyShardedDataParallel) -> Originals:
        """Those of a model, always the same ones."""
        held = vars(model).get(_HELD_AS)
        if held is None:
            held = vars(model)[_HELD_AS] = cls(model)  # not setattr, which would make it a submodule
        assert isinstance(held, cls)
        return held

    def _add(self, handle: Any) -> None:
        """Make the parameters of a flat parameter."""
        flat, own, by_place = handle.flat_param, [], {}
        for index, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
            trains = flat.requires_grad if flat._params is None else flat._params[index].requires_grad
            parameter = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=trains)
            own.append(parameter)
            by_place[info.module, info.param_name] = parameter
            self._by_module.setdefault(id(info.module), []).append((info.param_name, parameter))
        for shared in flat._shared_param_infos:
            parameter = by_place[shared.prim_module, shared.prim_param_name]
            self._by_module.setdefault(id(shared.module), []).append((shared.param_name, parameter))
        self._by_handle[id(handle)] = own

    def names_in(self, handle: Any) -> list[str]:
        """First names of the parameters in a flat parameter, in order."""
        names = {id(parameter): name for name, parameter in self.named.items()}
        return [names[id(parameter)] for parameter in self._by_handle[id(handle)]]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters in the order of the modules; `prefix` and `recurse` are ignored."""
        seen: set[int] = set()
        for module_name, module in self._wrapped[0].named_modules(remove_duplicate=remove_duplicate):
            for name, parameter in self._by_module.get(id(module), ()):
                if remove_duplicate and id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                yield clean_tensor_name(f"{module_name}.{name}" if module_name else name), parameter

    def get_submodule(self, target: str) -> nn.Module:
        """A module by its name before wrapping."""
        return self._wrapped[0].get_submodule(target)  # wrappers hand attributes on

    def get_output_embeddings(self) -> nn.Module | None:
        """As the model of `transformers` says, if it does."""
        find = getattr(self._wrapped[0], "get_output_embeddings", None)
        return find() if callable(find) else None


def handles_of(model: FullyShardedDataParallel) -> list[Any]:
    """The handles of all flat parameters, in an order all ranks share."""
    return [module._handle for module in FullyShardedDataParallel.fsdp_modules(model) if module._handle is not None]
