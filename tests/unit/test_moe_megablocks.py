"""The real megablocks over the same parameters: the same numbers, and one sentence for each thing it cannot do."""

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from eco_dist import quantize_weights_
from eco_dist.moe import MoEConfig, MoELayer, megablocks_import, standins
from eco_dist.moe.megablocks_import import INSTALL, describe, import_megablocks
from eco_dist.weights import QuantizedWeight
from tests.unit.test_moe_layer import SIZES, TOLERANCE, own, reference, relative

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megablocks") is None, reason=f"megablocks is not installed: {INSTALL}"
)


def both(recipe: str | None = None, **changes: object) -> list[MoELayer]:
    """A native layer and a megablocks layer with the same weights."""
    layers = []
    for backend in ("native", "megablocks"):
        torch.manual_seed(0)
        built = MoELayer(MoEConfig(**{**SIZES, "backend": backend, **changes}))
        built.init_weights(std=0.2)
        if recipe is not None:
            quantize_weights_(built, recipe)
        layers.append(built)
    return layers


@pytest.mark.parametrize("recipe", [None, "fp8"])
@pytest.mark.parametrize(
    "changes", [{}, {"glu": False, "activation": "gelu"}, {"top_k": 1}, {"score": "sigmoid", "shared_hidden": 16}]
)
def test_same_numbers_as_the_native_layer(changes: dict[str, object], recipe: str | None) -> None:
    native, megablocks = both(recipe, **changes)
    x = torch.randn(23, 64)
    (y, expected), (other, gradients) = own(native, x), own(megablocks, x)
    assert torch.equal(other, y)
    for name, gradient in gradients.items():
        if "experts" in name:
            assert torch.equal(gradient, expected[name]), name
        else:
            assert relative(gradient, expected[name]) < 1e-6, name


@pytest.mark.parametrize("glu", [True, False])
def test_equals_the_mixture_written_out(glu: bool) -> None:
    _, megablocks = both(glu=glu)
    x = torch.randn(23, 64)
    y, gradients = own(megablocks, x)
    expected, wanted = reference(megablocks, x)
    assert relative(y, expected) < TOLERANCE
    assert all(relative(gradient, wanted[name]) < TOLERANCE for name, gradient in gradients.items())


def test_a_state_dict_of_dmoe_loads_and_computes_the_same() -> None:
    import_megablocks()
    import megablocks
    from megablocks.layers.arguments import Arguments

    theirs = megablocks.dMoE(
        Arguments(
            hidden_size=64,
            ffn_hidden_size=48,
            moe_num_experts=6,
            moe_top_k=2,
            moe_normalize_expert_weights=1,
            bias=False,
            return_bias=False,
            mlp_type="glu",
            mlp_impl="grouped",
            fp16=False,
            device=torch.device("cpu"),
            moe_loss_weight=0.0,
        )
    )
    x = torch.randn(9, 64)
    for ours in both(activation="gelu"):
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x)[0], theirs(x.unsqueeze(1)).squeeze(1), rtol=1e-6, atol=1e-7)


def uses_of_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hold the storage of each decoded weight after a forward pass, besides this function."""
    _, layer = both("fp8")
    storages = []
    dequantize = QuantizedWeight.dequantize

    def watched(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        values = dequantize(weight, dtype)
        storages.append(values.untyped_storage())
        return values

    monkeypatch.setattr(QuantizedWeight, "dequantize", watched)
    y, _ = layer(torch.randn(5, 64))
    uses = [torch._C._storage_Use_Count(storage._cdata) - 1 for storage in storages]
    y.sum().backward()
    assert layer.experts.mlp.w1.grad is not None
    return uses


def test_no_decoded_weight_lives_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_of_decoded_weights(monkeypatch) == [0, 0, 0]
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", lambda *_: contextlib.nullcontext())
    assert all(uses_of_decoded_weights(monkeypatch)), "without the hooks megablocks keeps them"


def test_runs_without_triton() -> None:
    """A machine that never had Triton: it cannot be found, and megablocks imports all the same."""
    code = (
        "import importlib.util, sys\n"
        "class NoTriton:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton':\n"
        "            raise ModuleNotFoundError(name)\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else real(name, *a)\n"
        "sys.meta_path.insert(0, NoTriton())\n"
        "import torch\n"
        "from eco_dist.moe import MoEConfig, MoELayer\n"
        "layer = MoELayer(MoEConfig(width=16, hidden=32, experts=4, top_k=2, backend='megablocks'))\n"
        "layer(torch.randn(3, 16))[0].sum().backward()\n"
        "assert 'triton' not in sys.modules\n"
        "print(float(layer.experts.mlp.w1.grad.norm()) > 0)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert run.stdout.strip() == "True", run.stderr


@pytest.mark.slow
def test_sparse_products_in_tritons_interpreter() -> None:
    """Stk's own kernels, interpreted; with a version megablocks accepts, which it compares as a string."""
    code = (
        "import torch, triton\n"
        "triton.__version__ = '3.1.0'\n"
        "from eco_dist.moe import MoEConfig, MoELayer\n"
        "from eco_dist.moe.megablocks import MegaBlocks\n"
        "layer = MoELayer(MoEConfig(width=128, hidden=128, experts=2, top_k=1, backend='native'))\n"
        "x = torch.randn(5, 128)\n"
        "expected = layer(x)[0]\n"
        "layer.experts.backend = MegaBlocks(layer.config, 'sparse')\n"
        "from megablocks.backend import kernels\n"
        "for name in ('_padded_copy', '_padded_copy_wgrad'):\n"
        "    getattr(kernels, name).configs = getattr(kernels, name).configs[:1]\n"
        "y = layer(x)[0]\n"
        "y.sum().backward()\n"
        "print(float((y - expected).norm() / expected.norm()) < 1e-6)\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.stdout.strip() == "True", run.stderr


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ValueError, match="use backend 'native'"):
        MoELayer(MoEConfig(**SIZES, backend="megablocks", wire="fp8"))
    with pytest.raises(ValueError, match="expected products 'full'"):
        MoELayer(MoEConfig(**SIZES, backend="megablocks", products="fp8"))
    with pytest.raises(ValueError, match="hidden \\* experts of at least 128"):
        MoELayer(MoEConfig(width=16, hidden=8, experts=4, top_k=1, backend="megablocks"))
    from eco_dist.moe.megablocks import MegaBlocks

    with pytest.raises(ValueError, match="multiples of 128"):
        MegaBlocks(MoEConfig(**SIZES), "sparse")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_trap_in_arguments_is_said_before_it_snaps() -> None:
    """`Arguments()` refuses its own default, mlp_impl='sparse', with any Triton of today."""
    from eco_dist.moe.megablocks import MegaBlocks

    with pytest.raises(ValueError, match=r"triton before 3\.2.*Arguments\(\) refuses; use implementation 'grouped'"):
        MegaBlocks(MoEConfig(width=128, hidden=128, experts=2, top_k=1), "sparse")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.0")
    with pytest.raises(
        ValueError, match=r"expected megablocks 0\.10\.x, got 0\.9\.0; install it: pip install --no-deps"
    ):
        import_megablocks.__wrapped__()


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "stk" else find(name, *a))
    with pytest.raises(ValueError, match="expected the package stk"):
        import_megablocks.__wrapped__()


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(megablocks_import.NEEDED, "megablocks.layers.glu", ("GroupedGLU", "NoSuchClass"))
    with pytest.raises(ValueError, match=r"megablocks\.layers\.glu\.NoSuchClass"):
        import_megablocks.__wrapped__()


def test_describes_what_runs_here() -> None:
    text = describe()
    assert text.startswith("0.10.")
    assert ("plain torch" in text) == (sys.modules["grouped_gemm"].__doc__ == standins.grouped_gemm.__doc__)


def test_stand_ins_compute_what_the_extension_does() -> None:
    x = torch.tensor([3, 0, 3, 1, 0, 3], dtype=torch.int32)
    assert standins.histogram(x, 5).tolist() == [2, 1, 0, 3, 0]
    values, order = torch.empty_like(x), torch.empty_like(x)
    standins.sort(x, 3, values, order)
    assert values.tolist() == [0, 0, 1, 3, 3, 3]
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    sums = torch.empty(1, 6, dtype=torch.int32)
    standins.inclusive_cumsum(x[None], 1, sums)
    assert sums.tolist() == [[3, 3, 6, 7, 7, 10]]
    standins.exclusive_cumsum(x[None], 1, sums)
    assert sums.tolist() == [[0, 3, 3, 6, 7, 7]]
    repeated = torch.empty(1, 5, dtype=torch.int32)
    standins.replicate_forward(torch.tensor([[7, 8, 9]], dtype=torch.int32), torch.tensor([2, 2, 5]), repeated)
    assert repeated.tolist() == [[7, 7, 9, 9, 9]]
    columns = torch.empty(6, dtype=torch.int16)
    standins.indices(torch.tensor([128, 128, 384]), 128, 3, 2, columns)
    assert columns.tolist() == [0, 1, 4, 5, 4, 5]


@pytest.mark.parametrize("trans_b", [False, True])
def test_stand_in_for_grouped_gemm(trans_b: bool) -> None:
    counts = torch.tensor([2, 0, 3])
    a = torch.randn(5, 8, requires_grad=True)
    b = torch.randn((3, 12, 8) if trans_b else (3, 8, 12), requires_grad=True)
    out = standins.grouped_gemm().ops.gmm(a, b, counts, trans_b)
    expected = torch.cat([p @ (m.T if trans_b else m) for p, m in zip(a.split(counts.tolist()), b, strict=True)])
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((result * weight).sum(), (a, b), retain_graph=True) for result in (out, expected)]
    torch.testing.assert_close(*grads)
    into = torch.empty_like(expected)
    assert standins.gmm(a, b, counts, trans_b=trans_b, c=into) is into
    torch.testing.assert_close(into, expected)
