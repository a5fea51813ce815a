"""One run: set up, train to the target, log, record. This is the only training loop of the project."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints, agree_on_checkpoint
from dlrm_bench.bench.checkpoints.restarts import say_origin
from dlrm_bench.bench.checkpoints.saved_state import STATE_SCHEMA, LossStretch, RunState, extended
from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.instruments.abort import AbortWatch
from dlrm_bench.bench.instruments.beginning import BEGINNING
from dlrm_bench.bench.instruments.clock import IterationClock, frozen_gc
from dlrm_bench.bench.instruments.losses import LossHistory, NonFiniteError
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.instruments.schedule import Schedule, epoch_iterations, plan_schedule
from dlrm_bench.bench.instruments.stall import StallWatch
from dlrm_bench.bench.instruments.telemetry import RunMonitor
from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.machine.page_cache import drop_page_cache
from dlrm_bench.bench.machine.source import git_state
from dlrm_bench.bench.mlperf.division import counted_samples
from dlrm_bench.bench.mlperf.header import log_header, log_of_before
from dlrm_bench.bench.mlperf.log import MLPerfLog, RunStatus
from dlrm_bench.bench.obstacles import check_machine
from dlrm_bench.bench.records.schema import RunRecord, Telemetry, TrainingStatus
from dlrm_bench.bench.run_files import (
    LOG_NAME,
    agree_on_folder,
    discard_folder,
    keep_figures,
    keep_own_figures,
    named_checkpoints,
    write_results,
)
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import Dataset, HostBatch
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.data.metrics import distributed_auc
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.interface import Pipeline

if TYPE_CHECKING:  # a timed run imports nothing of the profiler
    from dlrm_bench.bench.instruments.train_metrics import TrainMetrics
    from dlrm_bench.bench.profile.profiled_run import ProfiledPipeline

LOGGER = logging.getLogger(__name__)
_BATCHES_IN_FLIGHT = 10
"""Maximum number of batches that were taken from the readers and that a GPU still reads."""


@dataclass(kw_only=True, slots=True)
class Run:
    """The objects of the training loop, and its progress."""

    config: RunConfig
    ranks: Ranks
    dataset: Dataset
    schedule: Schedule
    pipeline: Pipeline
    log: MLPerfLog
    clock: IterationClock
    losses: LossHistory
    bar: StillBar
    folder: Path
    checkpoints: Checkpoints
    metrics: "TrainMetrics | None" = None
    """NE and calibration beside the loss, if requested."""
    first: int = 0
    """Number of iterations before this run's first: those of the checkpoint that it resumes."""
    losses_before: list[LossStretch] = field(default_factory=list)
    """Losses of all previous iterations, whose global batches may have had other sizes."""
    auc: float | None = None
    place: Path | None = None
    """Folder of the measurements on rank 0, once they are written."""
    evaluated: int = 0
    """Number of batches, over all evaluations."""

    def train(self) -> None:
        """Runs the training loop: timed iterations, evaluations at MLPerf's cadence, and checkpoints; stops at the
        target."""
        with self._read(self.dataset.train_batches, self.pipeline.prepare, self.first) as batches, frozen_gc():
            self.clock.start()
            iteration, last = self.first, self.schedule.iterations
            rate = self.config.optimizer.rate
            scheduled = rate(iteration + 1) is not None
            while iteration < last:
                iteration += 1
                if scheduled and (value := rate(iteration)) is not None:
                    self.pipeline.set_learning_rate(value)
                self.losses.add(self.pipeline.train_step(batches))
                if self.metrics is not None:
                    self.metrics.end_step()
                self.clock.lap()
                evaluates, saves = self.schedule.evaluates_after(iteration), self.checkpoints.due_after(iteration)
                if evaluates or saves:
                    self.clock.pause()
                    losses = self.losses.finish()  # first: a model that diverged has no AUC, and must not be saved
                    self._draw(iteration)
                    if evaluates:
                        self.auc = self.evaluate(self.schedule.epoch_num(iteration))
                        if self.reached_target:
                            break
                        if iteration < last:
                            self.log.block_start(self.schedule.epoch_num(iteration))
                    if saves:
                        with named_checkpoints(self):
                            self.save(iteration, losses)
                    self.clock.start()
                if iteration == last and not evaluates:
                    last += self._lacking()
            self.clock.pause()
            self._draw(self.first + self.clock.iterations)

    def save(self, iteration: int, losses: list[float]) -> None:
        """Saves the state after `iteration`. losses: of this run's iterations until then. Collective."""
        size = self.schedule.global_batch_size
        state = RunState(
            schema=STATE_SCHEMA,
            samples=iteration * size,
            losses=extended(self.losses_before, size, losses),
            auc=self.auc,
            mlperf_log=self.log.text,
            run_id=self.folder.name,
            config=as_json(self.config),
            data_files=self.checkpoints.data_files,
            capacities=self.pipeline.capacities(),
        )
        self.checkpoints.save(iteration, state)

    def _lacking(self) -> int:
        """Returns the number of iterations that a run by time still lacks, by rank 0's clock; starts the clock again if
        there are any."""
        if self.schedule.min_time_s is None:
            return 0
        self.clock.pause()
        answer = [self.schedule.lacking(self.clock.local_ms(), self.config.warmup_iterations)]
        dist.broadcast_object_list(answer, src=0)
        if answer[0]:
            self._draw(self.first + self.clock.iterations)
            self.clock.start()
        return answer[0]

    def warm_up(self) -> None:
        """Trains and evaluates once, because first calls take longer; no weight changes."""
        evaluates = self.schedule.evaluate_every is not None
        self.pipeline.warm_up(evaluates)
        if evaluates:  # a sort of as many samples as an evaluation has
            samples = -(-self.dataset.eval_samples // self.ranks.world_size)
            scores = torch.zeros(max(samples, 2), device=self.ranks.device)
            distributed_auc(scores, torch.arange(scores.numel(), device=scores.device) % 2)
            if self.ranks.device.type == "cuda":
                self._pin_memory()

    def _pin_memory(self) -> None:
        """Makes PyTorch pin, and keep, the memory of all batches that training and an evaluation hold at a time."""
        data, config = self.config.data, self.config
        held = data.prefetch_batches + data.reader_threads + _BATCHES_IN_FLIGHT
        parts = named(config.benchmark).parts()
        batches = [parts.empty_batch(config, pin=True) for _ in range(2 * held)]
        batches.clear()

    def evaluate(self, epoch_num: float) -> float:
        """Returns the exact AUC over the evaluation samples of all ranks."""
        self.log.eval_start(epoch_num)
        valid: list[int] = []  # the pipeline reads batch i, which appends entry i, before it yields that batch's logits
        logits: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []

        def prepare(batch: HostBatch) -> tuple[int, Any]:
            return batch.num_valid, self.pipeline.prepare(batch)

        def count(batches: Iterator[tuple[int, Any]]) -> Iterator[Any]:
            for num_valid, batch in batches:
                valid.append(num_valid)
                yield batch

        with self._read(self.dataset.eval_batches, prepare) as batches:
            for i, (batch_logits, batch_labels) in enumerate(self.pipeline.evaluate(count(batches))):
                logits.append(batch_logits[: valid[i]].float())
                labels.append(batch_labels[: valid[i]])
                self.evaluated += 1
        auc = distributed_auc(torch.cat(logits), torch.cat(labels))
        self.log.eval_accuracy(epoch_num, auc)
        self.log.eval_stop(epoch_num)
        return auc

    def progress(self) -> tuple[int, int]:
        """Returns a number that grows as the training progresses, and the iterations trained; for any thread."""
        trained = self.first + self.clock.iterations
        return trained + self.evaluated + self.checkpoints.pieces, trained

    @property
    def epoch_num(self) -> float:
        """Fraction of the epoch trained so far."""
        return self.schedule.epoch_num(self.first + self.clock.iterations)

    @property
    def reached_target(self) -> bool:
        """Whether the last evaluation reached the target; False without a target."""
        target = self.config.target_auc
        return target is not None and self.auc is not None and self.auc >= target

    @property
    def status(self) -> TrainingStatus:
        """Returns the outcome of the run, once its loop has ended."""
        if self.config.target_auc is None:
            return "no_target"
        return "success" if self.reached_target else "aborted"

    @property
    def log_status(self) -> RunStatus:
        """Returns the status that closes the MLPerf log: 'aborted' after a missed target, else 'success'.

        A run without a target that trained all its iterations has succeeded, so its log does not look failed. It cannot
        pass for a submission: MLPerf's checker requires an eval_accuracy, which such a log lacks.
        """
        return "aborted" if self.status == "aborted" else "success"

    def _draw(self, iteration: int) -> None:
        """Draws the progress bar on rank 0, while the clock is paused: the ranks meet again before it restarts."""
        self.bar.show(iteration, "training" if self.auc is None else f"training, AUC {self.auc:.5f}")

    def _read(
        self, batches: Callable[..., Iterable[Any]], prepare: Callable[[Any], Any], first: int = 0
    ) -> Prefetcher[Any]:
        """Returns a reader of this rank's batches, prepared. first: number of batches to skip."""
        ranks = self.ranks
        samples = batches(ranks.rank, ranks.world_size, self.config.local_batch_size, pin=ranks.device.type == "cuda")
        if first:
            samples = samples[first:] if isinstance(samples, Sequence) else islice(samples, first, None)
        data = self.config.data
        return Prefetcher(samples, prepare, data.prefetch_batches, data.reader_threads)


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """The result of a run, on every rank."""

    folder: Path
    record: RunRecord


def run(
    config: RunConfig,
    ranks: Ranks,
    command: str,
    profiled: "Callable[[Pipeline, Path], ProfiledPipeline] | None" = None,
) -> Outcome:
    """Trains as `config` says and writes a record folder. Collective over all ranks.

    command: the command line, for the record. profiled: makes the pipeline of a profiled run from the pipeline and the
    record's folder; None in a timed run. ValueError on bad input, if possible before training: no folder is left
    then; a run that fails later leaves a folder whose log is closed as aborted.
    """
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    BEGINNING.now("waits for the other ranks in init_process_group")
    ranks.init_process_group()
    log = MLPerfLog(None)
    this: Run | None = None
    folder: Path | None = None

    def close_log() -> None:
        log.close("aborted", this.epoch_num if this else 0.0)
        if this is not None and BEGINNING.is_over:
            keep_own_figures(this)
        elif folder is not None:
            discard_folder(folder, log)

    with AbortWatch(ranks, close_log) as abort:
        BEGINNING.ends_by(abort.stop)
        check_machine(config, ranks)  # before a folder is made, which is never used again
        BEGINNING.now("opens its data")
        machine, source = describe_machine(), git_state(ROOT)  # now: files may change during the run
        dataset = named(config.benchmark).parts().open_data(config)
        _check_target(config, dataset.best_auc)
        schedule = plan_schedule(
            config, dataset.train_samples, ranks.world_size, epoch_iterations(config, dataset, ranks)
        )
        if config.target_auc is not None:  # raises where its samples fill no batch; nothing is read
            dataset.eval_batches(ranks.rank, ranks.world_size, config.local_batch_size)
        resumed = agree_on_checkpoint(config, schedule, ranks)
        origin = say_origin(config, resumed, ranks)
        folder = agree_on_folder(config, ranks, machine)
        log = MLPerfLog(folder / LOG_NAME if ranks.rank == 0 else None, counted_samples(config, dataset))
        if resumed is None:
            if config.mlperf.clear_cache and ranks.local_rank == 0:
                drop_page_cache()
            log_header(log, config, machine, dataset, schedule)
        else:
            schedule = schedule.resumed(resumed.first)
            log_of_before(log, resumed.state["mlperf_log"], config, dataset, schedule)
        BEGINNING.now("builds its pipeline")
        pipeline = build_pipeline(config, config.pipeline, ranks)
        BEGINNING.now("reads its checkpoint", by_bytes=True)
        checkpoints = Checkpoints(config, ranks, pipeline, resumed)
        profiling = profiled(pipeline, folder) if profiled else None
        this = Run(
            config=config,
            ranks=ranks,
            dataset=dataset,
            schedule=schedule,
            pipeline=cast(Pipeline, profiling) if profiling else pipeline,
            log=log,
            clock=IterationClock(ranks.device),
            losses=LossHistory(ranks.device, config.loss_interval, resumed.first if resumed else 0, pipeline.tallies),
            bar=StillBar(
                schedule.iterations, "training (drawn at evaluations only)", stderr_console(), ranks.rank == 0
            ),
            folder=folder,
            checkpoints=checkpoints,
        )
        if config.train_metrics:
            from dlrm_bench.bench.instruments.train_metrics import TrainMetrics  # and TorchRec's metrics

            this.metrics = TrainMetrics.of_run(config, ranks, pipeline)
        if resumed is not None:
            this.first, this.losses_before, this.auc = resumed.first, resumed.state["losses"], resumed.state["auc"]
            pipeline.go_on_after(resumed.first, resumed.capacities)
        stall = StallWatch(ranks, config.stall_timeout, this.progress, abort.stop)
        with this.bar:
            BEGINNING.now("warms up")
            this.warm_up()
            dist.barrier()
            BEGINNING.over()
            if origin is not None:
                log.note(origin)  # as training begins
            if resumed is None:
                log.init_stop()
                log.run_start()
                log.epoch_start()
            else:
                log.block_go_on(this.epoch_num)
            with stall:  # until the last checkpoint is on disk
                try:
                    with RunMonitor(ranks.device, this.clock, config.warmup_iterations) as monitor:
                        this.train()
                    losses = this.losses.finish()
                except NonFiniteError as error:
                    raise ValueError(f"{error}; {keep_figures(this, error)}") from None
                iterations_ms = this.clock.gather_ms()
                warmup = this.schedule.warmup_of(iterations_ms[0], config.warmup_iterations)
                telemetry = monitor.gather(warmup)
                _note_what_happened(telemetry, this.losses.too_large, log, ranks)
                log.close(this.log_status, this.epoch_num)
                with named_checkpoints(this):
                    checkpoints.wait()
        profile = profiling.profile() if profiling else None
        folder, record = write_results(
            this, machine, source, command, iterations_ms, losses, warmup, telemetry, profile
        )
        checkpoints.remove_snapshots()
        pipeline.close()
    return Outcome(folder=folder, record=record)


def _note_what_happened(telemetry: Telemetry, too_large: Mapping[str, int], log: MLPerfLog, ranks: Ranks) -> None:
    """Notes in the log, and as warnings on rank 0, the events that make figures of the run doubtful. too_large: by
    tensor."""
    notes = []
    if telemetry.get("clock_jump_s"):
        jump = telemetry["clock_jump_s"]
        notes.append(f"the wall clock jumped by {jump} s during the run: times in the log are off by that")
    if too_large:
        counts = ", ".join(f"{count} of {name}" for name, count in too_large.items())
        notes.append(f"numbers too large for eight bits, which became the largest: {counts}")
    for note in notes:
        log.note(note)
        if ranks.rank == 0:
            print(f"warning: {note}", file=sys.stderr, flush=True)


def _check_target(config: RunConfig, best_auc: float | None) -> None:
    if best_auc is not None and config.target_auc is not None and config.target_auc > best_auc:
        raise ValueError(
            f"--target-auc {config.target_auc} is above {best_auc:.5f}, the best that any model can reach on the "
            f"planted data of {config.data.path}: lower it"
        )
