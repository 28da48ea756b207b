"""Holding what a walk over objects found against what the process has: every live tensor, and the allocator.

A sum over the objects one knows of cannot show what one forgot. So the measurement also walks all live tensors of the
process, lists those whose storage it has not counted, and says which of them are master copies by another name.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eco_dist.memory.categories import Category
from eco_dist.memory.report import ProcessMemory, RankMemory, Unattributed, format_bytes

_LISTED = 20
_SMALLEST_LISTED = 1024
"""Tensors below this many bytes (counters, norms, generators' states) are added up and not listed."""
_CONTAINERS_DEEP = 3
_CUDA_BLOCK = 512
"""The CUDA allocator rounds every tensor up to whole blocks."""


class MasterCopyError(RuntimeError):
    """A weight-sized tensor in fp32 (or wider) survives a step although the recipe keeps none."""


class Attribution:
    """The storages a measurement has accounted for.

    Attributes:
        bytes: of all storages.
        suspects: master copies the walk itself came across, in optimizer state under an unknown key.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._seen: set[int] = set()
        self._weight_sizes: set[int] = set()
        self._local_total = self._total = 0
        self.bytes = 0
        self.suspects: list[Unattributed] = []

    def add(self, category: Category, tensor: Tensor) -> list[tuple[Category, int]]:
        """Count a tensor's storage unless it is counted already.

        Returns:
            Bytes of the tensor in its category, and of the rest of its storage as padding.
        """
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() in self._seen:
            return []
        self._seen.add(storage.data_ptr())
        self.bytes += storage.nbytes()
        content = min(tensor.numel() * tensor.element_size(), storage.nbytes())  # less, where it is expanded
        return [
            (category, content),
            (Category.PADDING if category.is_static else category, storage.nbytes() - content),
        ]

    def add_views(self, views: Iterable[tuple[str, Category, Tensor]]) -> Iterator[tuple[str, Category, int]]:
        """Count views that may share storages, but no bytes; what no view of a storage covers is padding.

        Args:
            views: name, category and tensor of each.

        Returns:
            Name, category and bytes; the padding of a storage under the name of its first view.
        """
        rest: dict[int, tuple[str, int]] = {}
        for name, category, tensor in views:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if not storage.nbytes() or (key in self._seen and key not in rest):
                continue
            if key not in rest:
                self._seen.add(key)
                self.bytes += storage.nbytes()
                rest[key] = (name, storage.nbytes())
            first, left = rest[key]
            content = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            rest[key] = (first, left - content)
            yield name, category, content
        for name, left in rest.values():
            assert left >= 0, (name, left)
            yield name, Category.PADDING, left

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is counted."""
        return tensor.untyped_storage().data_ptr() in self._seen

    def expect(self, *, local_elements: int, elements: int) -> None:
        """Note the size of a quantized weight: of this rank's shard, and of the whole."""
        self._weight_sizes |= {local_elements, elements} - {0}
        self._local_total += local_elements
        self._total += elements

    def is_master_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor is floating point, fp32 or wider, and exactly as large as a quantized weight, or as all.

        It may be a view of something larger, so its storage counts too.
        """
        if not tensor.is_floating_point() or tensor.element_size() < 4:
            return False
        sizes = {tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()}
        return not sizes.isdisjoint(self._weight_sizes | ({self._local_total, self._total} - {0}))

    def suspect(self, tensor: Tensor, holder: str) -> None:
        """Note a counted tensor that may be a master copy."""
        if self.is_master_copy(tensor):
            size = tensor.untyped_storage().nbytes()
            self.suspects.append(
                Unattributed(description=f"{in_words(tensor)} {holder}", bytes=size, is_weight_sized=True)
            )

    @staticmethod
    def refuse_master_copies(ranks: Sequence[RankMemory]) -> None:
        """Raise if any rank has one.

        Raises:
            MasterCopyError: naming rank, tensor and holder.
        """
        for rank in ranks:
            for tensor in rank.unattributed:
                if tensor.is_weight_sized:
                    raise MasterCopyError(
                        f"expected nothing weight-sized between steps but codes, scales and moments, got on rank "
                        f"{rank.rank} {tensor.description} ({format_bytes(tensor.bytes)}): it is as large as a "
                        "quantized weight; free it before the step ends, or register it as a buffer"
                    )


def cross_check(model: nn.Module, found: Attribution) -> tuple[tuple[Unattributed, ...], ProcessMemory]:
    """Live tensors the walk did not find, largest first, and what the process says it holds.

    Args:
        model: names the modules that hold strays.
        found: what the walk counted.
    """
    gc.collect()
    strays: dict[int, Tensor] = {}  # the one reference to them that is ours
    for tensor in _live_tensors():
        storage = tensor.untyped_storage()
        if storage.nbytes() and not found.knows(tensor):
            strays.setdefault(storage.data_ptr(), tensor)
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in strays.items()}
    masters = {key for key, tensor in strays.items() if found.is_master_copy(tensor)}
    worth_listing = [key for key, size in sizes.items() if key in masters or size >= _SMALLEST_LISTED]
    listed = sorted(worth_listing, key=lambda key: (key not in masters, -sizes[key]))[:_LISTED]
    modules = {id(vars(module)): f"{type(module).__name__} '{name}'" for name, module in model.named_modules()}
    entries = [*found.suspects, *(_describe(key, strays, modules, is_master=key in masters) for key in listed)]
    return tuple(entries), _process(model, found.bytes + sum(sizes.values()), tensors=len(strays))


def _live_tensors() -> Iterable[Tensor]:
    """Every tensor with a storage that Python can see, wrappers and what is on the meta device left out."""
    for candidate in gc.get_objects():
        try:
            # By type: isinstance would ask proxies and deprecated objects for their class.
            if not issubclass(type(candidate), Tensor) or is_traceable_wrapper_subclass(candidate) or candidate.is_meta:
                continue
            candidate.untyped_storage().data_ptr()
        except (ReferenceError, RuntimeError, NotImplementedError):
            continue  # a dead proxy, or a tensor without storage, as compilers keep them
        yield candidate


def _describe(key: int, strays: dict[int, Tensor], modules: dict[int, str], *, is_master: bool) -> Unattributed:
    """A stray in words; whoever holds it is looked for only where that matters, since it walks the whole process."""
    words = in_words(strays[key])
    return Unattributed(
        description=f"{words} {_holder(key, strays, modules)}" if is_master else words,
        bytes=strays[key].untyped_storage().nbytes(),
        is_weight_sized=is_master,
    )


def in_words(tensor: Tensor) -> str:
    """Dtype and shape."""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"


def _holder(key: int, strays: dict[int, Tensor], modules: dict[int, str]) -> str:
    """Where a tensor hangs: an attribute of a module or object, directly or through containers."""
    target: Any = strays[key]
    for _ in range(_CONTAINERS_DEEP):
        container = None
        for referrer in gc.get_referrers(target):
            if isinstance(referrer, dict) and referrer is not strays:
                name = next((name for name, value in referrer.items() if value is target), None)
                owner = modules.get(id(referrer)) or _owner(referrer)
                if name is not None and owner is not None:
                    return f"held by '{name}' of {owner}"
            if isinstance(referrer, (dict, list, tuple, set)) and referrer is not strays:
                container = referrer
        if container is None:
            break
        target = container
    return "held by a local variable or by C++"


def _owner(dictionary: dict[Any, Any]) -> str | None:
    """The object or module whose attributes a dictionary is; None if it is only a dictionary."""
    for referrer in gc.get_referrers(dictionary):
        if getattr(referrer, "__dict__", None) is dictionary:
            return str(getattr(referrer, "__name__", type(referrer).__name__))
    return None


def _process(model: nn.Module, tensor_bytes: int, *, tensors: int) -> ProcessMemory:
    """The CUDA allocator's count, exact up to its blocks; on CPU the resident set, which is far more than tensors."""
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    if device is not None:
        margin = _CUDA_BLOCK * (tensors + 1) + tensor_bytes // 100
        held = torch.cuda.memory_allocated(device)
        return ProcessMemory(source="cuda allocator", bytes=held, tensor_bytes=tensor_bytes, margin=margin)
    # glibc keeps freed memory; give it back first, so that the resident set is nearer to what is in use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return ProcessMemory(
        source="resident set", bytes=_resident_set(), tensor_bytes=tensor_bytes, margin=_PYTHON_AND_TORCH
    )


_PYTHON_AND_TORCH = 1 << 30
"""Resident bytes of the interpreter, torch's libraries and whatever else the program has loaded: not tensors."""


def _resident_set() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines["VmRSS"].split()[0]) * 1024
