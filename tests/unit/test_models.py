"""The Llama-style model: sizes, names, causality, initial weights, FP8 activations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eco_dist.models import PRESETS, Llama, LlamaConfig, llama_config, next_token_loss, round_activations
from eco_dist.numerics import Format, Granularity, fake_quantize

CONFIG = LlamaConfig(vocabulary=97, layers=2, width=32, heads=2)

# Non-embedding parameters; 30M is the number QuEST's runs report, the others follow from the same formula.
PAPER_PARAMETERS = {
    "30M": 30_482_560,
    "50M": 49_556_736,
    "100M": 102_777_856,
    "200M": 203_188_480,
    "430M": 443_068_288,
    "800M": 822_151_168,
}


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(CONFIG, seed=3)


def tokens(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(CONFIG.vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def test_logits_have_one_row_a_token(model: Llama) -> None:
    assert model(tokens()).shape == (2, 11, CONFIG.vocabulary)


@pytest.mark.parametrize("activations", ["none", "fp8"])
@pytest.mark.parametrize("changed", [0, 5, 10])
def test_a_later_token_changes_no_earlier_logit(activations: str, changed: int) -> None:
    model = Llama(dataclasses.replace(CONFIG, activations=activations), seed=3)
    before = tokens()
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % CONFIG.vocabulary
    first, second = model(before), model(after)
    torch.testing.assert_close(first[:, :changed], second[:, :changed], rtol=0, atol=0)
    assert not torch.equal(first[:, changed:], second[:, changed:])


def test_logits_depend_on_position(model: Llama) -> None:
    order = torch.tensor([[5, 9, 7, 1], [9, 5, 7, 1]])
    logits = model(order)[:, -1]
    assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize("preset", PAPER_PARAMETERS)
def test_paper_sizes_have_their_number_of_parameters(preset: str) -> None:
    config = llama_config(preset, vocabulary=1000)
    with torch.device("meta"):
        model = Llama(config)
    embedding = model.embed.weight.numel() + model.head.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total - embedding == config.block_parameters == PAPER_PARAMETERS[preset]
    assert embedding == 2 * 1000 * config.width


@pytest.mark.parametrize("preset", PRESETS)
def test_heads_of_paper_sizes_have_128_features(preset: str) -> None:
    shape = PRESETS[preset]
    assert shape.width // shape.heads == (128 if preset.endswith("M") else 32)


def test_parameters_have_the_documented_names(model: Llama) -> None:
    block = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")] + [f"feed_forward.w{i}" for i in (1, 2, 3)]
    block += ["attention_norm", "feed_forward_norm"]
    expected = {f"blocks.{layer}.{name}.weight" for layer in range(2) for name in block}
    assert {name for name, _ in model.named_parameters()} == expected | {"embed.weight", "norm.weight", "head.weight"}
    assert not list(model.buffers())


def test_initial_weights_follow_from_the_seed_on_any_device_path(model: Llama) -> None:
    with torch.device("meta"):
        late = Llama(CONFIG)
    late.to_empty(device="cpu")
    late.init_weights(seed=3)
    for (name, first), (_, second) in zip(model.named_parameters(), late.named_parameters(), strict=True):
        assert torch.equal(first, second), name
    assert not torch.equal(Llama(CONFIG, seed=4).head.weight, model.head.weight)


def test_initial_weights_have_the_documented_spread() -> None:
    model = Llama(LlamaConfig(vocabulary=512, layers=4, width=128, heads=4))
    assert model.blocks[0].attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[0].feed_forward.w2.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert torch.equal(model.norm.weight, torch.ones(128))


def test_loss_of_uniform_logits_is_the_log_of_the_vocabulary() -> None:
    loss = next_token_loss(torch.zeros(2, 3, 50, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(3.912023, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_per_token_with_a_straight_through_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 48, dtype=dtype, requires_grad=True)
    rounded = round_activations(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, fake_quantize(x.detach(), Format.E4M3, Granularity.ROW))
    assert not torch.equal(rounded, x)
    rounded.backward(torch.full_like(x, 3.0))
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_fp8_activations_change_the_forward_and_still_train() -> None:
    plain, rounded = (Llama(dataclasses.replace(CONFIG, activations=a), seed=3) for a in ("none", "fp8"))
    first, second = plain(tokens()), rounded(tokens())
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, rtol=0.2, atol=0.02)
    next_token_loss(second, tokens()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in rounded.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "divisible by 2"), ({"layers": 0}, "layers"), ({"activations": "int8"}, "'none' or 'fp8'")],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        llama_config("tinny", vocabulary=10)
