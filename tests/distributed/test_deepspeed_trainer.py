"""Hugging Face's Trainer with a DeepSpeed JSON, unchanged but for one import."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.deepspeed_ranks import contents, prepare_rank, run_ranks

pytest.importorskip("deepspeed")
pytest.importorskip("transformers", reason="extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="extra 'dev' is not installed")

STEPS = 6
LR = 5e-3
VOCABULARY = 128
SECTIONS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "ECOAdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "eco": {"recipe": "fp8-8bit"},
}


def users_json(stage: int) -> dict[str, Any]:
    """The stage, and everything "auto"."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        zero |= {"memory_efficient_linear": False}  # it would stay in place for the worker's next test
    return {**SECTIONS, "zero_optimization": zero}


def build_llama(seed: int) -> nn.Module:
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def trainer_of(patch: pytest.MonkeyPatch, directory: str, stage: int, seed: int) -> Any:
    """What a user's script sets up, on ranks without a GPU."""
    prepare_rank()
    import transformers as hf
    from accelerate.state import AcceleratorState, GradientState, PartialState

    import eco_dist.deepspeed  # noqa: F401  (the only new line)

    logging.disable(logging.WARNING)
    patch.setenv("RANK", str(dist.get_rank()))
    patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()  # of the worker's last Trainer
    # Without a GPU accelerate takes one rank for granted and Trainer refuses bf16.
    patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    PartialState(backend="gloo")
    patch.setattr(hf.training_args, "is_torch_bf16_gpu_available", lambda: True)
    arguments = hf.TrainingArguments(
        output_dir=directory,
        accelerator_config={"use_configured_state": True},
        deepspeed=f"{directory}/ds.json",
        bf16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        warmup_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
    )
    tokens = torch.randint(0, VOCABULARY // 4, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return hf.Trainer(model=build_llama(seed), args=arguments, train_dataset=data)


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_and_resume(directory: str, stage: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        return _train_and_resume(patch, directory, stage)


def _train_and_resume(patch: pytest.MonkeyPatch, directory: str, stage: int) -> dict[str, Any]:
    from eco_dist.deepspeed import measure

    trainer = trainer_of(patch, directory, stage, seed=0)
    trainer.train()
    engine = trainer.model_wrapped
    measure(engine, strict=True)  # raises for an fp32 tensor as large as a weight that belongs to nothing
    held = contents(engine)
    result = {
        "losses": losses_of(trainer),
        "class": type(engine.optimizer).__name__,
        "codes": {name: part["codes"].dtype for name, part in held.items()},
        "group": engine.optimizer.optimizer.param_groups[0],
        "json": engine.config,
    }
    result["group"] = {key: value for key, value in result["group"].items() if key != "params"}
    again = trainer_of(patch, directory, stage, seed=1)
    again.train(resume_from_checkpoint=f"{directory}/checkpoint-{STEPS // 2}")
    result["resumed"] = losses_of(again)
    resumed = contents(again.model_wrapped)
    result["same"] = all(torch.equal(v, resumed[name][key]) for name, part in held.items() for key, v in part.items())
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate would choose the GPU, and the ranks are gloo")
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 2), (2, 3)])
def test_trainer_trains_codes_and_resumes(world: int, stage: int, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(users_json(stage)))
    for result in run_ranks(world, train_and_resume, str(tmp_path), stage, fresh=world == 1):
        losses = result["losses"]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 0.3
        assert result["class"] == ("ECOZeroOptimizer" if stage == 2 else "ECOZeroOptimizer3")
        assert len(result["codes"]) == 14  # seven matrices in each of two layers
        assert set(result["codes"].values()) == {torch.uint8}
        assert result["group"]["betas"] == [0.9, 0.95]
        assert (result["group"]["lr"], result["group"]["weight_decay"]) == (LR, 0.1)
        assert result["json"]["train_batch_size"] == 4 * world
        assert result["json"]["gradient_clipping"] == 0.5
        assert result["json"]["zero_optimization"]["reduce_bucket_size"] == 64 * 64
        assert result["resumed"] == losses
        assert result["same"]
