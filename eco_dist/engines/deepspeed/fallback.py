"""Stage 0 with an optimizer that shards by itself: what works on any version of DeepSpeed.

With bf16 left out of its JSON, DeepSpeed's engine takes the client's optimizer as it is: it averages whole gradients
over the ranks, clips them, and calls `step`. The model stays plain, in the dtype that it is cast to. Codes, scales and
moments are cut among the ranks as at stage 1; after a step the codes travel, one byte a parameter, and every rank
writes the stored weights over the model's.

| on a rank, a quantized parameter     | bytes, bf16                 |
|--------------------------------------|-----------------------------|
| the model                            | 2                           |
| codes, scales, moments               | own / P                     |
| the model's gradients, to the step   | 2                           |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eco_dist.engines.deepspeed.checkpoint import ECO, load_shards, save_shards
from eco_dist.engines.deepspeed.checkpoint_runs import HoldsRuns, flat_runs, refuse_experts
from eco_dist.engines.deepspeed.common import is_bad, report_bad_gradients
from eco_dist.engines.deepspeed.config import EcoConfig
from eco_dist.engines.deepspeed.memory import Described, ZeroMemory
from eco_dist.engines.deepspeed.plain_runs import PlainRun
from eco_dist.engines.deepspeed.plan import plan_weights, refuse_quantized, split_optimizer
from eco_dist.engines.deepspeed.replicas import Location, Replicas
from eco_dist.engines.deepspeed.wire import Section, WireLayout
from eco_dist.engines.flat.held import HeldRun
from eco_dist.engines.flat.shards import WeightShard
from eco_dist.optim import ECOOptimizer


class FallbackOptimizer(HoldsRuns, torch.optim.Optimizer):
    """An ordinary torch optimizer over a plain model, whose ranks hold equal weights and get equal gradients.

    Attributes:
        optimizer: the `ShardOptimizer` that steps this rank's runs.
        shards: this rank's shard of every quantized parameter, by the parameter's id.
        overflow: whether the last step was skipped, on all ranks, because a gradient could not be used.
    """

    dynamic_loss_scale = False

    def __init__(self, model: nn.Module, client: ECOOptimizer, config: EcoConfig) -> None:
        """Encode the model's weights, rounded to nearest, and show them in the model. Collective.

        Args:
            model: a plain model, equal on all ranks.
            client: optimizer of its parameters.
            config: the `eco` section; `working_copy` and `fallback` are not read.

        Raises:
            ValueError: for quantized weights, DeepSpeed's experts, or an optimizer that clips by itself.
            RuntimeError: without a process group.
        """
        refuse_quantized(model)
        refuse_experts(dict(model.named_parameters()), "use stage 1 or 2 with the version of DeepSpeed that works")
        plan = plan_weights(model, config)
        self.optimizer = split_optimizer(client, plan)
        super().__init__(client.param_groups, client.defaults)
        self.param_groups, self.state = client.param_groups, self.optimizer.state
        self.overflow = False
        self._module, self._plan = model, plan
        self._group = _everyone()
        self._members = [[p for p in g["params"] if p.requires_grad] for g in self.optimizer.param_groups]
        self._plain = {index: self._adopt_plain(index) for index in self._indices(quantized=False)}
        self.shards: dict[int, WeightShard] = {}
        self._locations: dict[int, Location] = {}
        self._replicas = self._adopt_weights()
        self._is_stale = False
        model.register_load_state_dict_post_hook(lambda *_: self._take_over_module())
        model.register_forward_pre_hook(lambda *_: self._show_changed(), prepend=True)
        self.show_loaded()

    # --- who holds what ---------------------------------------------------------------------------------------------

    def _indices(self, *, quantized: bool) -> list[int]:
        """Numbers of the groups that are codes, or are not."""
        return [i for i, m in enumerate(self._members) if m and (self._plan.get(m[0]) is not None) == quantized]

    def _adopt_plain(self, index: int) -> PlainRun:
        run = PlainRun(self._members[index], self._group)
        self.optimizer.param_groups[index]["params"] = [run.flat]
        return run

    def _adopt_weights(self) -> Replicas:
        indices = self._indices(quantized=True)
        layout = WireLayout([self._section(index) for index in indices])
        device = next(self._module.parameters()).device
        replicas = Replicas(layout, self._group, device, resident=False)
        for section, index in enumerate(indices):
            offset, weights = 0, []
            for number, parameter in enumerate(self._members[index]):
                planned = self._plan[parameter]
                shard, self._locations[id(parameter)] = replicas.place(section, number, planned, offset)
                shard.assign(parameter.data)
                self.optimizer.adopt(shard)
                self.shards[id(parameter)] = shard
                weights.append(shard.weight)
                offset += planned.units.count(planned.elements)
            self.optimizer.param_groups[index]["params"] = weights
        return replicas

    def _section(self, index: int) -> Section:
        members = self._members[index]
        units = self._plan[members[0]].units
        count = -(-sum(units.count(parameter.numel()) for parameter in members) // self._group.size())
        return Section(units=units, count=count, scale_rows=len(members) if units.has_one_scale else count)

    # --- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or none on any rank if a gradient is not finite. Collective.

        Args:
            closure: computes the loss again, as in `torch.optim`.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: if a gradient is not finite and the client's optimizer was made with nonfinite="raise".
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.optimizer.follow_client()
        work = {index: [(run.flat, run.gradient())] for index, run in self._plain.items()}
        for index in self._indices(quantized=True):
            work[index] = [self._weight_and_gradient(parameter) for parameter in self._members[index]]
        self.overflow = self._any_bad(grad for pairs in work.values() for _, grad in pairs)
        if self.overflow:
            report_bad_gradients(self)
            return loss
        for index, pairs in sorted(work.items()):
            self.optimizer.step_tensors(pairs, self.optimizer.param_groups[index], 1.0)
        self.show_loaded()
        return loss

    def _weight_and_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """As under ZeRO, a parameter without a gradient has one of zeros."""
        shard = self.shards[id(parameter)]
        if parameter.grad is None:
            return shard.weight, torch.zeros(shard.weight.shape, device=shard.weight.device)
        return shard.weight, shard.mine(parameter.grad)

    def _any_bad(self, gradients: Iterable[Tensor]) -> bool:
        flags = [is_bad(grad).reshape(()) for grad in gradients if grad.numel()]
        device = self._replicas.own.device
        flag = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=device)
        worst = flag.to(torch.uint8).reshape(1)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        return bool(worst.item())

    @torch.no_grad()
    def show_loaded(self) -> None:
        """Write the stored weights of all ranks over the model's. Collective."""
        self._is_stale = False
        for run in self._plain.values():
            run.show()
        if self.shards:
            self._replicas.gather()
        for index in self._indices(quantized=True):
            for parameter in self._members[index]:
                self._replicas.decode_into(self._locations[id(parameter)], parameter.data)
        self._replicas.drop()

    # --- what is written into the model -----------------------------------------------------------------------------

    def _take_over_module(self) -> None:
        """Encode what `load_state_dict` changed; the next forward shows it on all ranks."""
        for index in self._indices(quantized=True):
            for parameter in self._members[index]:
                self.shards[id(parameter)].assign_changed(parameter.data)
        for run in self._plain.values():
            run.take_changed()
        self._is_stale = True

    def _show_changed(self) -> None:
        if self._is_stale:
            self.show_loaded()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks on the first one, an empty list on the others. Collective, as DeepSpeed calls it."""
        mine = {
            ECO: save_shards(self.shards.values(), self.optimizer.state_dict()),
            "plain": [run.flat.detach().clone() for run in self._plain.values()],
        }
        ranks: list[Any] | None = [None] * self._group.size() if self._group.rank() == 0 else None
        dist.gather_object(mine, ranks, group=self._group, group_dst=0)
        return {"ranks": ranks or []}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where a state was saved, on as many ranks. Collective.

        Raises:
            ValueError: if it is of another number of ranks, recipe or set of parameters.
        """
        ranks = state_dict.get("ranks", [])
        if len(ranks) != self._group.size():
            raise ValueError(
                f"expected the state of {self._group.size()} ranks of the fallback, got {len(ranks)}; load on as many "
                "ranks as saved it, from storage that all nodes share, or use eco_dist.checkpoint.save and load, which "
                "go to any number"
            )
        mine = ranks[self._group.rank()]
        load_shards(list(self.shards.values()), mine[ECO])
        self.optimizer.load_state_dict(mine[ECO]["optimizer"])
        self.state = self.optimizer.state
        for run, saved in zip(self._plain.values(), mine["plain"], strict=True):
            run.flat.copy_(saved)
        self.show_loaded()

    def plain_runs(self) -> Iterator[tuple[int, HeldRun]]:
        """This rank's runs of the parameters in high precision."""
        for run in self._plain.values():
            yield from flat_runs(self.optimizer, run.flat, run.places())

    # --- memory -----------------------------------------------------------------------------------------------------

    def memory_tensors(self) -> Iterable[Described]:
        """Every tensor held between steps, for the memory report."""
        return ZeroMemory(self, self._module).memory_tensors()

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Sizes of the weights that are codes, for the memory report."""
        return ZeroMemory(self, self._module).quantized_weights()

    def plain_flats(self) -> Iterator[tuple[Tensor, list[tuple[Any, int, int]]]]:
        """fp32 runs, and which elements of them belong to which parameter."""
        for run in self._plain.values():
            yield run.flat, [(parameter, first, count) for parameter, _, _, first, count in run.places() if count]


def _everyone() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("expected an initialized process group; call deepspeed.init_distributed() first")
    return world
