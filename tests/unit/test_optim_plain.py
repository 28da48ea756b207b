"""ECOAdamW and ECOSGD as ordinary `torch.optim` optimizers on high-precision parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from eco_dist.optim import ECOSGD, ECOAdamW
from eco_dist.weights import quantize_weights_
from tests.reference import updates

STEPS = 200
AGREES = {"rtol": 2e-6, "atol": 2e-6}
"""fp32 against fp32 with another order of operations, over STEPS steps of 1e-2."""

NEAR_FLOAT64 = {"rtol": 1e-5, "atol": 1e-5}
"""fp32 against float64: the factor 1 - lr wd alone is off by 3e-8 at each of STEPS steps."""


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (7,), (2, 3, 4))]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Gradients of a quadratic with noise: weights move and v changes."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = 0.1 * parameter.detach() + torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch(weight_decay: float, maximize: bool) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-9, "weight_decay": weight_decay, "maximize": maximize}
    optimizers = ECOAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(STEPS):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, **AGREES)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizers[0].state[one][key], optimizers[1].state[two][key], **AGREES)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_equals_algorithm_2_without_a_quantizer(weight_decay: float, maximize: bool) -> None:
    (weight,) = ours = parameters()[:1]
    theta, m = weight.detach().double().numpy(), 0.0
    optimizer = ECOSGD(ours, lr=1e-2, momentum=0.9, weight_decay=weight_decay, maximize=maximize)
    for step in range(STEPS):
        set_gradients(ours, step)
        grad = weight.grad.double().numpy() * (-1 if maximize else 1)
        theta, m = updates.alg2_before_quantizer(theta, grad, m, lr=1e-2, beta=0.9, weight_decay=weight_decay)
        optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), theta, **NEAR_FLOAT64)


def test_sgd_is_torch_sgd_at_lr_times_one_minus_beta() -> None:
    """As the docstring promises: torch's momentum is a sum, ours an average."""
    ours, theirs = parameters(), parameters()
    optimizers = ECOSGD(ours, lr=1e-1, momentum=0.9), torch.optim.SGD(theirs, lr=1e-1 * (1 - 0.9), momentum=0.9)
    for step in range(50):
        for group, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(group, step)
            optimizer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_groups_keep_their_own_options() -> None:
    """lr, betas, weight decay and maximize differ by group, as in torch."""
    ours, theirs = parameters(), parameters()

    def groups(params: list[nn.Parameter]) -> list[dict]:
        return [
            {"params": params[:1], "lr": 1e-3, "weight_decay": 0.3},
            {"params": params[1:2], "betas": (0.5, 0.9), "maximize": True},
            {"params": params[2:], "lr": 3e-2, "eps": 1e-4},
        ]

    optimizers = ECOAdamW(groups(ours), betas=(0.9, 0.999)), torch.optim.AdamW(groups(theirs), weight_decay=0.0)
    for step in range(50):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(params, step)
            optimizer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, **AGREES)


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS // 2, eta_min=1e-5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS, cycle_momentum=True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_adamw(name: str) -> None:
    """The learning rate (and beta1, which OneCycleLR cycles) is read at each step."""
    ours, theirs = parameters(), parameters()
    optimizers = (
        ECOAdamW(ours, lr=1e-2, betas=(0.9, 0.98)),
        torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0),
    )
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    seen = set()
    for step in range(STEPS - 1):
        for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
        seen.add(optimizers[0].param_groups[0]["betas"][0])
    assert (len(seen) > 50) == (name == "one-cycle")
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, **AGREES)


def test_one_cycle_cycles_the_momentum_of_sgd() -> None:
    (weight,) = ours = parameters()[:1]
    theta, m = weight.detach().double().numpy(), 0.0
    optimizer = ECOSGD(ours, lr=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=2e-2, total_steps=60, cycle_momentum=True)
    betas = []
    for step in range(59):
        group = optimizer.param_groups[0]
        betas.append(group["momentum"])
        set_gradients(ours, step)
        theta, m = updates.alg2_before_quantizer(
            theta, weight.grad.double().numpy(), m, lr=group["lr"], beta=group["momentum"]
        )
        optimizer.step()
        scheduler.step()
    assert max(betas) - min(betas) > 0.09
    np.testing.assert_allclose(weight.detach().numpy(), theta, **NEAR_FLOAT64)


@pytest.mark.parametrize("optimizer_class", [ECOAdamW, ECOSGD])
def test_a_closure_is_called_once_with_gradients_enabled(optimizer_class: type) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    quantize_weights_(model, "fp8")
    optimizer, calls = optimizer_class(model.parameters(), lr=1e-2), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert calls == [True] * 20
    assert losses[-1] < 0.7 * losses[0]


def test_step_hooks_run_before_and_after() -> None:
    ours = parameters()
    optimizer = ECOAdamW(ours, lr=1e-2)
    before = ours[0].detach().clone()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.equal(ours[0], before)))
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.equal(ours[0], before)))
    set_gradients(ours, 0)
    optimizer.step()
    assert seen == [True, False]


def test_a_tensor_learning_rate_is_read_like_a_number() -> None:
    ours, theirs = parameters(), parameters()
    for params, lr in ((ours, torch.tensor(1e-2)), (theirs, 1e-2)):
        set_gradients(params, 0)
        ECOAdamW(params, lr=lr).step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, **AGREES)


def test_zero_grad_and_gradients_that_are_missing() -> None:
    """A parameter without a gradient is untouched and has no state; a frozen one too."""
    ours = parameters()
    ours[1].requires_grad_(False)
    optimizer = ECOAdamW(ours, lr=1e-2)
    before = [parameter.detach().clone() for parameter in ours]
    set_gradients(ours[2:], 0)
    optimizer.step()
    assert torch.equal(ours[0], before[0])
    assert torch.equal(ours[1], before[1])
    assert not torch.equal(ours[2], before[2])
    assert set(optimizer.state) == {ours[2]}
    optimizer.zero_grad()
    assert ours[2].grad is None


def test_bf16_parameters_keep_their_dtype_and_have_fp32_moments() -> None:
    """High-precision parameters are stepped in their own dtype; quantize_weights_ leaves none in bf16."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.5)
    optimizer = ECOAdamW([weight], lr=0.5)
    optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert bool((weight == 0.5).all())
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
