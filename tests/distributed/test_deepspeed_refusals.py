"""What cannot work is refused with the fix, and other optimizers never meet our classes."""

from typing import Any

import pytest
import torch

from eco_dist import ECOSGD, ECOAdamW, quantize_weights_
from tests.distributed.deepspeed_ranks import ODD, config, engine_of, masters_config, run_ranks, train
from tests.distributed.models import build

pytest.importorskip("deepspeed")

CPU = {"device": "cpu"}
REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (0, {}, "set zero_optimization.stage to 1, 2 or 3, or 'fallback' to true"),
    (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "use stage 2, or set"),
    (2, {"zero": {"offload_optimizer": CPU}, "zero_force_ds_cpu_optimizer": False}, "keep it on the device"),
    (3, {"zero": {"offload_param": CPU}}, "keep it on the device"),
    (3, {"zero": {"zero_quantized_weights": True}}, "one byte codes already"),
    (3, {"zero": {"zero_quantized_gradients": True}}, "qgZ"),
    (2, {"zero": {"elastic_checkpoint": True}}, "leave it out"),
    (2, {"zero": {"parameter_alignment": True}}, "units are aligned already"),
    (3, {"zero": {"reduce_scatter": False}}, "set it to true"),
    (2, {"eco": {"recpe": "fp8"}}, "did you mean 'recipe'"),
    (2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "use bf16"),
]


def refusals() -> list[str]:
    messages = []
    for stage, extra, _ in REFUSED:
        try:
            engine_of(
                build(**ODD), config(stage, **{k: dict(v) if isinstance(v, dict) else v for k, v in extra.items()})
            )
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_refusals_say_what_to_do() -> None:
    for (_, extra, advice), message in zip(REFUSED, run_ranks(1, refusals)[0], strict=True):
        assert advice in message, extra
        assert "\n" not in message


def refuse_quantized() -> str:
    model = build(**ODD)
    quantize_weights_(model, "fp8")
    try:
        engine_of(model, config(2))
    except ValueError as error:
        return str(error)
    return "accepted"


def refuse_clipping_twice() -> str:
    model = build(**ODD)
    json = {key: value for key, value in config(2).items() if key != "optimizer"}
    try:
        engine_of(model, json, optimizer=ECOAdamW(model.parameters(), max_grad_norm=1.0))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_an_optimizer_that_clips_by_itself_is_refused() -> None:
    """Its own clipping would be left out without a word; in JSON DeepSpeed refuses the option."""
    assert "set gradient_clipping instead" in run_ranks(1, refuse_clipping_twice)[0]


def test_a_quantized_model_is_refused() -> None:
    assert "leave out quantize_weights_" in run_ranks(1, refuse_quantized)[0]


def classes(stage: int) -> list[str]:
    names = []
    model = build(**ODD)
    for arguments in (
        {},
        {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)},
        {"optimizer": ECOAdamW(build(**ODD).parameters())},
        {"optimizer": ECOSGD(build(**ODD).parameters(), lr=0.1)},
    ):
        client = arguments.get("optimizer")
        json = config(stage, "bf16") if isinstance(client, ECOAdamW | ECOSGD) else masters_config(stage, "bf16")
        if client is not None:
            json.pop("optimizer", None)
        if isinstance(client, ECOAdamW | ECOSGD):
            model = build(**ODD)
            arguments = {"optimizer": type(client)(model.parameters(), lr=1e-2)}
        engine = engine_of(model if client is not None else build(**ODD), json, **arguments)
        assert all(loss == loss for loss in train(engine, 2))
        names.append(type(engine.optimizer).__name__)
    return names


@pytest.mark.parametrize("stage", [2, 3])
def test_only_eco_optimizers_are_routed(stage: int) -> None:
    own = "DeepSpeedZeroOptimizer" if stage == 2 else "DeepSpeedZeroOptimizer_Stage3"
    eco = "ECOZeroOptimizer" if stage == 2 else "ECOZeroOptimizer3"
    assert run_ranks(2, classes, stage) == [[own, own, eco, eco]] * 2


def signatures() -> bool:
    import inspect

    import deepspeed

    import eco_dist.deepspeed as ours

    return inspect.signature(ours.initialize) == inspect.signature(deepspeed.initialize)


def test_initialize_has_the_signature_of_deepspeed() -> None:
    assert run_ranks(1, signatures) == [True]
