"""The configuration of a training run: frozen, keyword-only sections, validated where they are declared.

Read it from YAML and overrides with `eco_dist.training.overrides.load_config`, where a field is ``section.field``.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from eco_dist.models import SPARSE_PRESETS

__all__ = [
    "HEADLINE",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecipeConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
]

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
HEADLINE = {"model": "preset", "recipe": "name", "engine": "name", "optimizer": "name"}
"""Sections that may be given as one word: ``recipe=fp8`` means ``recipe.name=fp8``."""

SHORT = {"zero": "engine.zero"}
"""Overrides that may be given without their section."""

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """What is trained.

    Args:
        preset: a name of `eco_dist.models.PRESETS` or `SPARSE_PRESETS`.
        activations: ``fp8`` rounds the input of each block linear to E4M3 (paper §2).
        keep: name patterns of weights to keep in fp32 besides embedding, head, norms and routers, such as
            ``*attention*`` for the paper's SMoE, of which experts alone are quantized.
        balance_loss, z_loss: weights of the routers' losses, for a model with experts.
        experts: who multiplies them (`eco_dist.moe.MoEConfig.backend`).
        expert_wire: how tokens travel to experts on other ranks: ``full``, or ``fp8`` for about half the bytes of bf16.
        expert_capacity: most rows of an expert, as a multiple of an even share; None drops no token.
        init_from: a safetensors file of plain fp32/bf16 weights to start from, such as an earlier run's
            ``weights.safetensors``; None draws them from ``run.seed``.
    """

    preset: str = "tiny"
    activations: Literal["none", "fp8"] = "none"
    keep: tuple[str, ...] = ()
    balance_loss: Annotated[float, Field(ge=0.0)] = 0.01
    z_loss: Annotated[float, Field(ge=0.0)] = 0.001
    experts: Literal["auto", "native", "megablocks"] = "auto"
    expert_wire: Literal["full", "fp8"] = "full"
    expert_capacity: Annotated[float, Field(gt=0.0)] | None = None
    init_from: Path | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RecipeConfig:
    """How weights are stored: a named recipe, and changes to single parts of it.

    Args:
        name: a name of `eco_dist.recipe.RECIPES`.
        format, granularity, rounding, compensation, injection, moments, moments_rounding, idle, residual: the value of
            that field of `Recipe`; null keeps the named recipe's, the word ``none`` removes it (a BF16 weight has
            granularity ``none``).
    """

    name: str = "fp8"
    format: str | None = None
    granularity: str | None = None
    rounding: str | None = None
    compensation: str | None = None
    injection: str | None = None
    moments: str | None = None
    moments_rounding: str | None = None
    idle: str | None = None
    residual: str | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """What it is trained on.

    Args:
        path: a text file or a folder; None takes Python's own standard library, found on the machine.
        suffixes: which files of a folder are text.
        tokenizer: ``bytes``; ``bpe`` to train one on the training split; or the path of a ``tokenizer.json``.
        vocabulary: size of the vocabulary ``bpe`` is trained to.
        seq_len: tokens a sequence.
        batch: sequences an optimizer step, over all ranks and all accumulated micro-batches together.
        micro_batch: the most sequences a rank computes at a time; a larger share of the batch is accumulated in as few
            parts as that takes. None leaves the parts to ``run.accumulate``.
        heldout: share of the files (of the bytes, for a single file) kept for validation.
    """

    path: Path | None = None
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")
    tokenizer: str = "bytes"
    vocabulary: Annotated[int, Field(ge=257, le=65_536)] = 4096
    seq_len: Positive = 128
    batch: Positive = 16
    micro_batch: Positive | None = None
    heldout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """How weights move.

    Args:
        name: ``adamw`` (`ECOAdamW`) or ``sgd`` (`ECOSGD`).
        lr: peak learning rate.
        beta1, beta2, eps: AdamW's; the defaults are the paper's.
        momentum: SGD's.
        weight_decay: decoupled decay.
        decay_norms: decay one-dimensional weights (norms) too.
        clip: largest global gradient norm; None leaves gradients as they are.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(ge=0.0)] = 1e-3
    beta1: Beta = 0.9
    beta2: Beta = 0.98
    eps: Annotated[float, Field(gt=0.0)] = 1e-9
    momentum: Beta = 0.9
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    decay_norms: bool = False
    clip: Annotated[float, Field(gt=0.0)] | None = 1.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ScheduleConfig:
    """The learning rate over the run: linear warmup, then cosine.

    Args:
        warmup: share of the steps spent warming up.
        warmup_start: learning rate of the first step, as a share of the peak.
        final: learning rate the cosine ends at, as a share of the peak.
    """

    warmup: Share = 0.1
    warmup_start: Share = 0.01
    final: Share = 0.1


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunConfig:
    """How long, where to, and what is written.

    Args:
        directory: everything the run writes goes here.
        steps: optimizer steps.
        seed: of the initial weights, the order of the data and the stochastic rounding.
        accumulate: micro-batches an optimizer step.
        log_every, eval_every: steps between log lines and between validations (the last step always has both).
        eval_sequences: how many held-out sequences a validation reads; the same ones every time and on any world size.
        overwrite: allow ``directory`` to hold an earlier run, which is replaced.
        save_every: steps between checkpoints, below ``directory/checkpoints``; None writes none.
        keep: newest checkpoints to keep.
        resume: go on from the newest checkpoint in ``directory``, if there is one: on any number of ranks.
        tensorboard: write TensorBoard events too (extra ``tensorboard``).
        plot: write ``loss.png`` at the end (extra ``plot``).
        save_weights: write ``weights.safetensors`` at the end.
    """

    directory: Path = Path("runs/latest")
    steps: Positive = 200
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    accumulate: Positive = 1
    log_every: Positive = 10
    eval_every: Positive = 50
    eval_sequences: Positive = 64
    overwrite: bool = False
    save_every: Positive | None = None
    keep: Positive = 2
    resume: bool = False
    tensorboard: bool = False
    plot: bool = True
    save_weights: bool = True


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EngineConfig:
    """Who shards the weights.

    Args:
        name: ``single`` (one process), ``fsdp2`` (PyTorch's ``fully_shard``), ``fsdp1`` (its
            ``FullyShardedDataParallel``) or ``deepspeed`` (its ZeRO), all but the first under torchrun or DeepSpeed's
            launcher.
        ranks: the world size the run is meant for; None takes the world it finds.
        expert_parallel: ranks that share one set of experts; a divisor of the world size.
        compute: dtype of the forward and backward pass; None is bf16 for ``deepspeed``, which keeps its working copy in
            that dtype and knows no other here, and fp32 for the others.
        device: ``auto`` takes CUDA where there is one.
        timeout_s: seconds a collective may wait for a rank before the run fails.
        zero: stage of ``deepspeed``; None is 2. ``zero=3`` alone means this key.
        working_copy: what forward and backward read at its stages 1 and 2: ``replica``, ``transient`` or ``kept``
            (docs/deepspeed.md); None is ``replica``.
        json: a DeepSpeed JSON with further settings of ``deepspeed``, such as buckets.
    """

    name: Literal["single", "fsdp2", "fsdp1", "deepspeed"] = "single"
    ranks: Positive | None = None
    expert_parallel: Positive = 1
    compute: Literal["fp32", "bf16"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 600
    zero: Literal[1, 2, 3] | None = None
    working_copy: Literal["replica", "transient", "kept"] | None = None
    json: Path | None = None

    @property
    def layout(self) -> str:
        """How the memory plan calls it: ``single``, ``fsdp2``, ``fsdp1``, ``zero1`` to ``zero3``."""
        return f"zero{self.stage}" if self.name == "deepspeed" else self.name

    @property
    def stage(self) -> int:
        """The ZeRO stage in force."""
        return 2 if self.zero is None else self.zero

    @property
    def computes(self) -> str:
        """The dtype in force."""
        return self.compute or ("bf16" if self.name == "deepspeed" else "fp32")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """All sections of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @model_validator(mode="after")
    def _experts_are_there(self) -> TrainConfig:
        parallel = self.engine.expert_parallel
        if parallel > 1 and self.model.preset not in SPARSE_PRESETS:
            raise ValueError(
                f"expected a preset with experts for engine.expert_parallel={parallel}, got {self.model.preset!r}; "
                f"choose one of {', '.join(SPARSE_PRESETS)}"
            )
        if parallel > 1 and self.engine.name != "fsdp2":
            raise ValueError(
                f"expected engine.expert_parallel=1 for engine.name={self.engine.name}, got {parallel}; "
                "set engine.name=fsdp2"
            )
        return self

    @model_validator(mode="after")
    def _keys_fit_the_engine(self) -> TrainConfig:
        engine = self.engine
        if engine.name == "deepspeed":
            if engine.computes != "bf16":
                raise ValueError(
                    f"expected engine.compute=bf16 for engine.name=deepspeed, got {engine.computes}; leave it out"
                )
            return self
        for key in ("zero", "working_copy", "json"):
            if getattr(engine, key) is not None:
                raise ValueError(
                    f"expected engine.{key} for engine.name=deepspeed alone, got it for {engine.name}; "
                    "set engine.name=deepspeed or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _batch_splits(self) -> TrainConfig:
        if self.data.micro_batch is not None and self.run.accumulate > 1:
            raise ValueError(
                f"expected data.micro_batch or run.accumulate, got {self.data.micro_batch} and {self.run.accumulate}; "
                "leave one of the two out"
            )
        if self.data.batch % self.run.accumulate:
            raise ValueError(
                f"expected data.batch divisible by run.accumulate, got {self.data.batch} and {self.run.accumulate}; "
                "change one of the two"
            )
        return self
