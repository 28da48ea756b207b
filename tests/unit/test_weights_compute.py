"""Forward and backward with a quantized weight equal those of its dequantized twin, bit for bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eco_dist.optim import ECOAdamW
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_

QUANTIZED_RECIPES = ("fp8", "paper", "int4", "bf16")


def quantized(*shape: int, recipe: str = "fp8", seed: int = 0) -> nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4
    return nn.Parameter(QuantizedWeight.from_values(values, Recipe.from_name(recipe)))


def twin_of(model: nn.Module) -> nn.Module:
    """The same module around ordinary fp32 weights with the stored values."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantizedWeight):
                setattr(module, name, nn.Parameter(parameter.decode(), parameter.requires_grad))
    return twin


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def run(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Output, gradient of the input and gradients of the parameters, for a loss that weighs outputs unevenly."""
    x = x.clone().requires_grad_(x.is_floating_point())
    with autocast(dtype):
        y = model(x)
    (y.float() * torch.arange(y.numel()).reshape(y.shape).cos()).sum().backward()
    return y.detach(), x.grad, [parameter.grad for parameter in model.parameters()]


def assert_same(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> None:
    y, grad_x, grads = run(model, x, dtype)
    y_twin, grad_x_twin, grads_twin = run(twin_of(model), x, dtype)
    assert y.dtype == y_twin.dtype
    assert torch.equal(y, y_twin)
    assert (grad_x is None) == (grad_x_twin is None)
    assert grad_x is None or torch.equal(grad_x, grad_x_twin)
    for grad, grad_twin in zip(grads, grads_twin, strict=True):
        assert type(grad) is Tensor, "a gradient is an ordinary tensor"
        assert grad.dtype == torch.float32
        assert torch.equal(grad, grad_twin)


def linear(columns: int = 40, rows: int = 24, bias: bool = True, recipe: str = "fp8") -> nn.Module:
    torch.manual_seed(2)
    layer = nn.Linear(columns, rows, bias=bias)
    quantize_weights_(layer, recipe)
    assert isinstance(layer.weight, QuantizedWeight)
    return layer


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast-bf16"])
@pytest.mark.parametrize("shape", [(40,), (7, 40), (3, 5, 40), (2, 3, 4, 40), (0, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear(bias: bool, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    assert_same(linear(bias=bias), torch.randn(shape, generator=torch.Generator().manual_seed(1)), dtype)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
@pytest.mark.parametrize("columns", [1, 33, 129, 300])
def test_linear_of_every_storage_and_odd_widths(recipe: str, columns: int) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    assert_same(linear(columns, 9, recipe=recipe), x, torch.bfloat16)


def test_linear_without_gradients() -> None:
    """A frozen weight gets none, its input does; nothing is recorded under no_grad."""
    layer = linear()
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 40, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_linear_by_keyword_and_with_half_precision_input() -> None:
    weight = quantized(6, 8)
    x = torch.randn(3, 8)
    assert torch.equal(F.linear(input=x, weight=weight), F.linear(x, weight.decode()))
    assert torch.equal(F.linear(x.bfloat16(), weight), F.linear(x.bfloat16(), weight.decode().bfloat16()))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast-bf16"])
def test_a_network_with_tied_bf16_embedding_and_head(dtype: torch.dtype | None) -> None:
    """`plain="bf16"`: embedding lookups and a head over one shared weight add up in one fp32 gradient."""
    torch.manual_seed(0)
    embedding, hidden, head = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, hidden, nn.GELU(), head)
    quantize_weights_(model, "fp8", plain="bf16")
    assert model[0].weight is model[3].weight
    twin = twin_of(model)
    twin[3].weight = twin[0].weight
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    y, _, grads = run(model, tokens, dtype)
    y_twin, _, grads_twin = run(twin, tokens, dtype)
    if dtype is None:
        assert torch.equal(y, y_twin)
    for grad, grad_twin in zip(grads, grads_twin, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, grad_twin, rtol=0.02 if dtype else 1e-6, atol=0.05 if dtype else 1e-6)


class Functions(nn.Module):
    """One expression over a weight of any shape."""

    def __init__(self, weight: nn.Parameter, function) -> None:
        super().__init__()
        self.weight = weight
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast-bf16"])
@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((3, 8, 6), lambda x, w: torch.stack([x @ w[i] for i in range(3)])),
        ((3, 8, 6), lambda x, w: torch.bmm(x.expand(3, 5, 8), w)),
        ((3, 8, 6), lambda x, w: torch.einsum("tc,ecd->etd", x, w)),
        ((3, 6, 8), lambda x, w: torch.matmul(x, w.transpose(1, 2))),
        ((3, 6, 8), lambda x, w: x @ w.mT),
        ((3, 6, 8), lambda x, w: F.linear(x, w[1])),
        ((8, 6), lambda x, w: x @ w),
        ((8, 6), lambda x, w: x.mm(w)),
        ((6, 8), lambda x, w: x @ w.t()),
        ((6, 8), lambda x, w: x @ w.T),
        ((6, 8), lambda x, w: (w @ x.t()).t()),
        ((8, 6), lambda x, w: torch.addmm(torch.ones(6), x, w)),
    ],
    ids=["experts", "bmm", "einsum", "transpose", "mT", "slice", "matmul", "mm", "t", "T", "rmatmul", "addmm"],
)
def test_products_by_value(shape: tuple[int, ...], function, dtype: torch.dtype | None) -> None:
    """Expert weights `w[i]`, batched and transposed products: dequantized once, explicitly."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    if dtype is None:
        assert_same(Functions(quantized(*shape), function), x)
        return
    model = Functions(quantized(*shape), function)
    y, _, (grad,) = run(model, x, dtype)
    y_twin, _, (grad_twin,) = run(twin_of(model), x, dtype)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), y_twin.float(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(grad, grad_twin, rtol=0.02, atol=0.05)


def test_backward_holds_codes_and_no_dequantized_weight() -> None:
    """Between forward and backward the graph saves the input and the quantized weight, nothing weight-sized in fp32."""
    layer = linear()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(3, 40, requires_grad=True))
    heavy = [t for t in saved if t.numel() >= layer.weight.numel()]
    assert heavy
    assert all(isinstance(t, QuantizedWeight) for t in heavy)


def test_gradients_accumulate_over_micro_batches() -> None:
    layer = linear()
    xs = torch.randn(3, 4, 40)
    for x in xs:
        layer(x).square().sum().backward()
    twin = twin_of(layer)
    for x in xs:
        twin(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def test_a_weight_stepped_between_forward_and_backward_is_noticed() -> None:
    """As for an ordinary parameter: the second backward would use the new weight for the old activations."""
    model = nn.Sequential(linear(), linear(24, 3))
    optimizer = ECOAdamW(model.parameters(), lr=0.1)
    loss = model(torch.randn(5, 40)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_compiled_layers_give_the_same_output_and_gradients(recipe: str) -> None:
    """One graph, no breaks; the codes are inputs of the graph, so a step needs no new compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8, bias=False))
    quantize_weights_(model, recipe)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 40)
    for _ in range(2):
        for one, two in zip(run(compiled, x, None)[2], run(twin, x, None)[2], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(compiled(x), twin(x), rtol=1e-6, atol=1e-6)
        for module in (model, twin):
            ECOAdamW(module.parameters(), lr=0.05).step()
            module.zero_grad()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


def test_quantized_recipes_here_cover_every_storage() -> None:
    formats = {(recipe.format, recipe.granularity) for recipe in RECIPES.values() if recipe.quantizes}
    assert formats == {(r.format, r.granularity) for r in map(Recipe.from_name, QUANTIZED_RECIPES)}
