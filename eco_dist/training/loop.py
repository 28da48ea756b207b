"""The training loop: build, step, measure, report.

Every rank runs the same steps on its own slice of the same global batches. Rank 0 alone writes files and prints.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from torch import Tensor

from eco_dist.checkpoint import faults
from eco_dist.memory import WireMeter
from eco_dist.models import model_config
from eco_dist.recipe import Recipe
from eco_dist.training.batch import split_batch
from eco_dist.training.build import (
    BuiltModel,
    Text,
    build_model,
    build_recipe,
    open_run_directory,
    open_text,
)
from eco_dist.training.config import TrainConfig
from eco_dist.training.display import Display
from eco_dist.training.evaluate import Evaluator
from eco_dist.training.heartbeat import naming_lost_ranks
from eco_dist.training.memory_report import RunMemory
from eco_dist.training.metrics import MetricsWriter, StepMetrics, read_metrics
from eco_dist.training.plain_weights import save_plain_weights
from eco_dist.training.plot import plot_expert_load, plot_losses
from eco_dist.training.preflight import check_nodes, facts_of
from eco_dist.training.ranks import Ranks, limit_waiting, open_ranks
from eco_dist.training.resume import RunCheckpoints
from eco_dist.training.routing import RunRouting
from eco_dist.training.sampler import WindowSampler
from eco_dist.training.schedule import warmup_cosine
from eco_dist.training.summary import Summary
from eco_dist.training.window import LogWindow

__all__ = ["train"]


def train(config: TrainConfig, *, memory_report: Path | None = None) -> Summary:
    """Train a model as ``config`` says, and write metrics, summary, memory report, weights and plot to its directory.

    Collective under torchrun: every rank calls it with the same configuration.

    Args:
        config: the run.
        memory_report: directory for the full memory report (HTML, Markdown, JSON, PNG); None writes none.

    Raises:
        ValueError: the configuration cannot be run: an impossible recipe, a wrong world size, nodes that differ, too
            little memory or text, weights of another model, a directory that holds a run.
        LostRanksError: a rank or a node has gone, or hangs.
        FileNotFoundError: a file it names is missing.
    """
    recipe = build_recipe(config.recipe)
    model_config(config.model.preset, vocabulary=1)  # an unknown preset fails here, before anything is written
    with open_ranks(config.engine) as ranks, ExitStack() as at_end:
        split_batch(config, ranks.world_size)  # one that does not split fails here too
        everyone = check_nodes(ranks, facts_of(config))
        with naming_lost_ranks(ranks, everyone, config.engine.timeout_s):
            return _train(config, recipe, ranks, memory_report, at_end)


def _train(config: TrainConfig, recipe: Recipe, ranks: Ranks, memory_report: Path | None, at_end: ExitStack) -> Summary:
    ranks.on_first(lambda: open_run_directory(config))
    text = open_text(config, ranks)
    built = build_model(config, recipe, text.vocabulary, ranks)
    limit_waiting(config.engine)
    with Display(recipe.name, config.run.steps, shown=ranks.is_first) as display:
        trainer = Trainer(config, recipe, text, built, ranks, display, memory_report)
        at_end.push(trainer.checkpoints.leave)
        trainer.run()
    return trainer.finish()


class Trainer:
    """One run in progress: model, optimizer, data and what has been measured so far."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        text: Text,
        built: BuiltModel,
        ranks: Ranks,
        display: Display,
        memory_report: Path | None = None,
    ) -> None:
        self.config, self.recipe, self.text, self.built = config, recipe, text, built
        self.ranks, self.display = ranks, display
        self.engine = built.engine
        self.scheduler = warmup_cosine(self.engine.optimizer, config.run.steps, **dataclasses.asdict(config.schedule))
        self.sampler = WindowSampler(
            windows=text.train.windows,
            batch=config.data.batch,
            seed=config.run.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        self.split = split_batch(config, ranks.world_size)
        self.evaluate = Evaluator(
            text.heldout,
            wanted=config.run.eval_sequences,
            batch=self.split.micro,
            ranks=ranks,
            compute=self.engine.compute_context,
        )
        self.checkpoints = RunCheckpoints(config, self.engine, self.scheduler, self.sampler)
        self.done = self.checkpoints.resume()
        self.window = LogWindow(ranks)
        self.routing = RunRouting(config.model, ranks)
        self.memory = RunMemory(self.engine, built.planned, built.baseline, memory_report)
        self.wire_bytes: list[dict[str, int]] = []
        self.last: StepMetrics | None = None
        self.seconds = 0.0

    def run(self) -> None:
        """All steps, with their log lines and validations."""
        self._announce()
        started = time.perf_counter()
        with self._open_metrics() as writer:
            for step in range(self.done + 1, self.config.run.steps + 1):
                faults.point(f"train:step-{step}")
                logs, validates = self._due(step)
                self.engine.collect_stats = logs
                lr = float(self.scheduler.get_last_lr()[0])
                grad_norm = self._measured_step(step)
                self.scheduler.step()
                self.display.advance()
                if logs:
                    self._log(step, lr, grad_norm, validates, writer)
                if step < self.config.run.steps:
                    self.checkpoints.after(step)
        self.seconds = time.perf_counter() - started

    def finish(self) -> Summary:
        """Write what remains of a run, and sum it up; collective.

        The last checkpoint comes last: a run that dies before is resumed from an earlier one, and writes all of it.
        """
        directory = self.config.run.directory
        if self.config.run.save_weights:
            save_plain_weights(self.engine.weights(), directory / "weights.safetensors", self.ranks)
        self.memory.finish(self.ranks)
        summary = self._summary()
        if self.ranks.is_first:
            summary.write(directory)
            self._plot(directory)
        self.checkpoints.after(self.config.run.steps)
        self.checkpoints.finish()
        if self.ranks.is_first:
            self.display.print(f"{self.recipe.name}: wrote {directory} after {self.seconds:.1f} s")
        return summary

    def _announce(self) -> None:
        config, built = self.config, self.built
        self.display.print(
            f"{config.model.preset}: {built.parameters:,} parameters, {built.block_parameters:,} without embedding and "
            f"head; {len(self.text.train.tokens):,} training and {len(self.text.heldout.tokens):,} held-out tokens"
        )
        self.display.print(built.engine.conversion.table())

    def _open_metrics(self) -> AbstractContextManager[MetricsWriter | None]:
        if not self.ranks.is_first:
            return nullcontext()
        run = self.config.run
        return MetricsWriter(run.directory, after=self.done, tensorboard=run.tensorboard)

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether a log line and a validation are due after this step."""
        run = self.config.run
        validates = step % run.eval_every == 0 or step == run.steps
        return validates or step == self.done + 1 or step % run.log_every == 0, validates

    def _measured_step(self, step: int) -> float:
        """A step; the first one is followed by the memory report, the second one runs under the wire meter.

        The first step of a sharded engine also sets things up, so its traffic is not that of a step.
        """
        if step != min(self.done + 2, self.config.run.steps):
            with self.memory.around_step(step - self.done):
                norm = self._step()
        else:
            with WireMeter() as meter:
                norm = self._step()
            self.wire_bytes = self.ranks.gather({name: int(count) for name, count in meter.bytes.items()})
        if step == self.done + 1:
            self.memory.measure(self.config.run.directory, self.display, self.ranks)
        return norm

    def _step(self) -> float:
        """Gradients of one global batch, clipping, the optimizer's step; returns the gradient norm before clipping."""
        for inputs, targets in self._micro_batches():
            with self.engine.compute_context():
                loss, total = self.routing.losses(self.engine.model(inputs), targets)
            self.engine.backward(total)
            self.window.add(loss.detach() / self.split.accumulate, targets.numel())
        self.window.steps += 1
        return self.engine.step()

    def _micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        windows = self.sampler.next_batch()
        for first in range(0, len(windows), self.split.micro):
            inputs, targets = self.text.train.batch(windows[first : first + self.split.micro])
            yield inputs.to(self.ranks.device), targets.to(self.ranks.device)

    def _log(self, step: int, lr: float, grad_norm: float, validates: bool, writer: MetricsWriter | None) -> None:
        loss, tokens_per_second = self.window.close()
        rms_error, moved_share = self._stats()
        self.last = StepMetrics(
            step=step,
            loss=loss,
            val_loss=self.evaluate(self.engine.model) if validates else None,
            lr=lr,
            tokens_per_second=tokens_per_second,
            grad_norm=grad_norm,
            rms_quantization_error=rms_error,
            moved_share=moved_share,
            skipped_steps=self.engine.skipped_steps,
            **self.routing.close(),
        )
        self.window.open()
        self.display.show(self.last)
        if writer is not None:
            writer.write(self.last)

    def _stats(self) -> tuple[float | None, float | None]:
        """sqrt(sum e^2 / sum weight^2) and the share of stored weights that moved, of all ranks; None without codes."""
        stats = self.engine.stats
        own = (stats.sum_squared_error, stats.sum_squared_weight, stats.moved, stats.elements) if stats else (0.0,) * 4
        error, weight, moved, elements = self.ranks.sum(own)
        if not elements:
            return None, None
        return math.sqrt(error / weight) if weight else 0.0, moved / elements

    def _summary(self) -> Summary:
        planned, measured, last = self.built.planned, self.memory.measured, self.last
        assert measured is not None
        assert last is not None
        assert last.val_loss is not None
        ranks = range(self.ranks.world_size)
        return Summary(
            recipe=self.recipe.name,
            engine=self.config.engine.layout,
            world_size=self.ranks.world_size,
            steps=self.config.run.steps,
            seconds=self.seconds,
            loss=last.loss,
            val_loss=last.val_loss,
            parameters=self.built.parameters,
            block_parameters=self.built.block_parameters,
            planned_static_bytes=[planned.static_bytes(rank) for rank in ranks],
            measured_static_bytes=[measured.static_bytes(rank) for rank in ranks],
            planned_bytes_per_parameter=planned.bytes_per_parameter(),
            measured_bytes_per_parameter=measured.bytes_per_parameter(),
            planned_quantized_bytes_per_parameter=planned.quantized_bytes_per_parameter(),
            measured_quantized_bytes_per_parameter=measured.quantized_bytes_per_parameter(),
            wire_bytes_per_step=self.wire_bytes,
            skipped_steps=last.skipped_steps,
        )

    def _plot(self, directory: Path) -> None:
        if not self.config.run.plot:
            return
        try:
            title = f"{self.config.model.preset}, recipe {self.recipe.name}"
            lines = read_metrics(directory)
            plot_losses({self.recipe.name: lines}, directory / "loss.png", title=title)
            plot_expert_load(lines, directory / "expert_load.png", title=title)
        except ValueError as error:  # a finished run is not lost for want of a picture
            self.display.print(f"no plot: {error}")
