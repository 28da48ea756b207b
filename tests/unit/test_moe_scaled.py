"""Products of E4M3 operands: what is rounded, and that torch's kernel would be given what it asks for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eco_dist import quantize_weights_
from eco_dist.moe import scaled
from eco_dist.numerics import Format, Granularity, decode, encode
from eco_dist.recipe import Recipe
from tests.unit.test_moe_layer import layer, own, relative

ROWS = 16


def rounded(x: Tensor) -> Tensor:
    codes, scales = encode(x.float(), Format.E4M3, Granularity.ROW)
    return decode(codes, scales, Format.E4M3, Granularity.ROW, x.shape[-1])


def by_rows(**changes: Any) -> Recipe:
    return Recipe.from_name("fp8").replace(granularity=Granularity.ROW, **changes)


def test_equals_products_of_rounded_tokens() -> None:
    """One expert, two matrices: out = gelu(R(x) w1^T) w2, and back with R(dy) where the sum runs along stored rows."""
    moe = layer(experts=1, top_k=1, glu=False, activation="gelu", products="fp8")
    quantize_weights_(moe, by_rows())
    x = torch.randn(ROWS, 64)
    y, gradients = own(moe, x)
    w1, w2 = (moe.experts.mlp.get_parameter(name).decode() for name in ("w1", "w2"))
    hidden = (rounded(x) @ w1.T).requires_grad_()
    active = torch.nn.functional.gelu(hidden, approximate="tanh")
    assert relative(y, active @ w2) < 1e-6
    grad_y = 2 * (active @ w2).detach()
    active.backward(rounded(grad_y) @ w2.T)
    assert relative(gradients["experts.mlp.w2"], active.T @ grad_y) < 1e-6
    assert relative(gradients["experts.mlp.w1"], hidden.grad.T @ x) < 1e-6


@pytest.mark.parametrize("glu", [True, False])
def test_close_to_decoded_weights(glu: bool) -> None:
    results = []
    for products in ("full", "fp8"):
        moe = layer(glu=glu, products=products)
        quantize_weights_(moe, by_rows())
        results.append(own(moe, torch.randn(40, 64, generator=torch.Generator().manual_seed(1))))
    (y, gradients), (other, others) = results
    assert 0 < relative(other, y) < 0.05
    for name, gradient in gradients.items():
        if "router" not in name:
            assert 0 < relative(others[name], gradient) < 0.06, name


def kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """What `torch._scaled_grouped_mm` computes; torch's own checks, on the meta device, look at the arguments."""
    on_meta = [t.to("meta") for t in (a, b, scale_a, scale_b)]
    assert [t.stride() for t in on_meta] == [t.stride() for t in (a, b, scale_a, scale_b)]
    checked = torch._scaled_grouped_mm(*on_meta, offs=offs.to("meta"), out_dtype=out_dtype)
    out, first = a.new_empty(checked.shape, dtype=out_dtype), 0
    for expert, last in enumerate(offs.tolist()):
        left = a[first:last].float() * scale_a[first:last, None]
        out[first:last] = (left @ (b[expert].float() * scale_b[expert])).to(out_dtype)
        first = last
    return out


def test_the_kernel_is_given_what_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = layer(products="fp8")
    quantize_weights_(moe, by_rows())
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    (y, expected), calls = own(moe, x), []

    class Torch:
        """The module, but for the kernel that has no CPU form."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def _scaled_grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(args[0].shape)
            return kernel(*args, **kwargs)

    monkeypatch.setattr(scaled, "torch", Torch())
    monkeypatch.setattr(scaled, "_kernel_takes", lambda *_: True)
    other, gradients = own(moe, x)
    assert len(calls) == 3  # w1 and v1 forward, w2 backward
    assert relative(other, y) < 0.01
    assert all(relative(g, expected[name]) < 0.02 for name, g in gradients.items())


def test_cpu_tensors_never_reach_the_kernel() -> None:
    assert not scaled._kernel_takes(torch.zeros(16, 64, dtype=torch.bfloat16), 48)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (None, "expected experts that are codes in the forward pass for products 'fp8', got torch.float32"),
        ("fp8", "row scales for products 'fp8', got .* with block scales"),
        (by_rows(format=Format.INT8), "expected E4M3 experts with row scales"),
    ],
)
def test_other_weights_are_refused(recipe: Recipe | str | None, sentence: str) -> None:
    moe = layer(products="fp8")
    if recipe is not None:
        quantize_weights_(moe, recipe)
    with pytest.raises(ValueError, match=sentence):
        moe(torch.randn(4, 64))
