"""Unscaling and clipping inside the step: the weights of torch's own way, and no gradient rewritten."""

import copy

import pytest
import torch
from torch import nn

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.optim.kernels.cpu import CpuKernel
from eco_dist.optim.kernels.reference import ReferenceKernel

BACKENDS = ("cpu", "reference")


def model_of(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 130), nn.Linear(130, 7))
    quantize_weights_(model, recipe)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return model


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.decode() if hasattr(p, "decode") else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("recipe", ["fp8", "fp32-master"])
def test_clipping_is_that_of_torch(recipe: str, limit: float, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECO_DIST_KERNEL", backend)
    inside, outside = model_of(recipe), model_of(recipe)
    grads = [parameter.grad.clone() for parameter in inside.parameters()]
    optimizer = ECOAdamW(inside.parameters(), lr=1e-2, max_grad_norm=limit)
    optimizer.step()
    norm = nn.utils.clip_grad_norm_(outside.parameters(), limit)
    other = ECOAdamW(outside.parameters(), lr=1e-2)
    other.step()
    assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert other.grad_norm is None
    for parameter, grad in zip(inside.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    for a, b in zip(inside.parameters(), outside.parameters(), strict=True):
        first, second = optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"]
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-8) or recipe == "fp8"  # codes may fall to a neighbour
    for a, b in zip(values_of(inside), values_of(outside), strict=True):
        assert torch.allclose(a, b, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_scaler_leaves_unscaling_to_the_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of two, so that nothing is rounded: the same bits as without a scale."""
    monkeypatch.setenv("ECO_DIST_KERNEL", backend)
    models = [model_of("fp8") for _ in range(2)]
    optimizers = [ECOAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # makes its state
    for parameter in models[0].parameters():
        parameter.grad *= 1024.0
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[1].step()
    assert optimizers[0].grad_norm == pytest.approx(optimizers[1].grad_norm)
    for a, b in zip(values_of(models[0]), values_of(models[1]), strict=True):
        assert torch.equal(a, b)
    assert optimizers[0]._loss_scale() == 1.0


@pytest.mark.parametrize("limit", [None, 1.0])
def test_an_overflow_skips_the_step_and_halves_the_scale(limit: float | None) -> None:
    model = model_of("fp8")
    before = copy.deepcopy(values_of(model))
    optimizer = ECOAdamW(model.parameters(), lr=1e-2, max_grad_norm=limit)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    next(model.parameters()).grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.skipped_steps == 1
    assert optimizer.grad_norm is None
    assert all(torch.equal(a, b) for a, b in zip(values_of(model), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [0, 1, 7, 1024, 1025, 100_003])
def test_the_norm(dtype: torch.dtype, elements: int) -> None:
    grad = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = float(grad.double().norm())
    kernel = CpuKernel("portable")
    assert kernel.norm(grad) == pytest.approx(wanted, rel=1e-6)
    assert float(ReferenceKernel().norm(grad)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**63])
def test_a_norm_tells_what_cannot_be_used(value: float) -> None:
    grad = torch.randn(5000)
    grad[4097] = value
    for kernel in (CpuKernel("portable"), ReferenceKernel()):
        assert not kernel.norm(grad) < 2.0**63


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_makes_no_sense(limit: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm > 0"):
        ECOAdamW([nn.Parameter(torch.ones(2))], max_grad_norm=limit)
