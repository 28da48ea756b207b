"""The sparse Llama: its sizes are those of the papers, and training reports what its experts do."""

import json
from pathlib import Path

import pytest
import torch

from eco_dist import plan
from eco_dist.models import SMoE, SMoEConfig, build_transformer, logits_of, model_config
from eco_dist.moe import MoEConfig
from eco_dist.training import load_config, train
from eco_dist.training.plot import plot_expert_load

ROOT = Path(__file__).parents[2]


def on_meta(preset: str, vocabulary: int) -> tuple[SMoE, SMoEConfig]:
    config = model_config(preset, vocabulary=vocabulary)
    assert isinstance(config, SMoEConfig)
    with torch.device("meta"):
        model = build_transformer(config)
    assert isinstance(model, SMoE)
    return model, config


def active(model: SMoE, config: SMoEConfig) -> float:
    idle = config.expert_parameters * (1 - config.moe.top_k / config.moe.experts)
    return sum(p.numel() for p in model.parameters()) - idle


def test_the_papers_sparse_model() -> None:
    """2.1 B weights, 324 M active, 96.7 % in experts; experts alone in FP8 make 9.10 bytes a parameter."""
    model, config = on_meta("smoe-2.1B", 32128)
    total = sum(p.numel() for p in model.parameters())
    assert total == 2_107_764_288
    assert active(model, config) == 324_136_512
    assert config.expert_parameters / total == pytest.approx(0.967, abs=5e-4)
    report = plan(model, "paper", also_skip=["*attention*"])
    assert report.bytes_per_parameter() == pytest.approx(9.10, abs=0.01)


def test_deepseek_moe() -> None:
    """16.4 B weights, 2.8 B active."""
    model, config = on_meta("deepseek-moe-16B", 102_400)
    assert sum(p.numel() for p in model.parameters()) == 16_375_728_128
    assert active(model, config) == pytest.approx(2.83e9, rel=1e-3)
    names = [name for name, _ in model.named_parameters()]
    assert "blocks.0.feed_forward.w1.weight" in names
    assert "blocks.1.moe.shared_expert.up_proj.weight" in names


@pytest.mark.parametrize("preset", ["smoe-nano", "smoe-tiny"])
def test_counts_its_own_parameters(preset: str) -> None:
    model, config = on_meta(preset, 100)
    assert config.block_parameters == sum(p.numel() for p in model.parameters()) - 2 * 100 * config.width


def test_initial_weights_follow_the_seed_and_the_depth() -> None:
    config = model_config("smoe-nano", vocabulary=31)
    one, same, other = (build_transformer(config, seed=seed) for seed in (1, 1, 2))
    name = "blocks.0.moe.experts.mlp.w1"
    weights = [dict(model.named_parameters()) for model in (one, same, other)]
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert weights[0][name].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights[0]["blocks.0.moe.experts.mlp.w2"].std().item() == pytest.approx(0.01, rel=0.05)


def test_says_how_it_routed() -> None:
    model = build_transformer(model_config("smoe-nano", vocabulary=31, backend="native"))
    logits, routing = model(torch.randint(0, 31, (2, 9)))
    assert logits_of((logits, routing)) is logits
    assert routing.counts.shape == (2, 4)
    assert routing.counts.sum(-1).tolist() == [2 * 9 * 2] * 2
    assert routing.load_balancing_loss.requires_grad


def test_shapes_that_do_not_fit_are_refused() -> None:
    moe = MoEConfig(width=64, hidden=8, experts=4, top_k=1)
    sizes = {"vocabulary": 10, "layers": 2, "heads": 2, "moe": moe}
    with pytest.raises(ValueError, match=r"expected moe\.width of the model's 32, got 64"):
        SMoEConfig(**sizes, width=32)
    with pytest.raises(ValueError, match="at least one layer has experts"):
        SMoEConfig(**sizes, width=64, dense_layers=2)
    with pytest.raises(ValueError, match="did you mean 'smoe-tiny'"):
        model_config("smoe-tyni", vocabulary=10)


def test_training_on_one_process_reports_experts(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    overrides = (
        "model.preset=smoe-nano",
        f"data.path={text}",
        "data.seq_len=32",
        "data.batch=4",
        "run.steps=4",
        "run.log_every=1",
        "run.eval_sequences=4",
        f"run.directory={tmp_path / 'run'}",
        "engine.name=single",
        "engine.ranks=null",
        "engine.expert_parallel=1",
    )
    summary = train(load_config(ROOT / "configs" / "smoe-tiny.yaml", overrides))
    assert summary.planned_static_bytes == summary.measured_static_bytes
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert len(line["expert_load"]) == 2
        for layer in line["expert_load"]:
            assert sum(layer) == pytest.approx(1.0)
        assert 0.0 < line["load_evenness"] <= 1.0
        assert 0.0 < line["router_entropy"] <= 1.387  # log 4
        assert line["dropped_share"] == 0.0
    assert (tmp_path / "run" / "expert_load.png").stat().st_size > 10_000


def test_a_run_without_experts_has_no_map(tmp_path: Path) -> None:
    plot_expert_load([{"step": 1, "loss": 2.0}], tmp_path / "load.png", title="dense")
    assert not (tmp_path / "load.png").exists()


def test_expert_parallelism_needs_experts(tmp_path: Path) -> None:
    overrides = ("model.preset=nano", "engine.name=single", "engine.ranks=null", f"run.directory={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="expected a preset with experts"):
        train(load_config(ROOT / "configs" / "smoe-tiny.yaml", overrides))
