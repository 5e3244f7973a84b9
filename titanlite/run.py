"""Run: the objects of a run, and its work beside the training loop: validation, samples, metrics,
checkpoints, and the end of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import numpy as np
import torch

from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.state import TrainState
from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.data.loader import Loader
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize
from titanlite.errors import Diverged, LoaderError, SilentFault
from titanlite.evaluate import score_tasks, validate
from titanlite.generate import generate
from titanlite.job import Job
from titanlite.log import logger
from titanlite.metrics.experts import ExpertMetrics
from titanlite.metrics.guard import StepGuard
from titanlite.metrics.hardware import Hardware
from titanlite.metrics.memory import OutOfMemory, explain, is_out_of_memory, phase
from titanlite.metrics.meter import Meter
from titanlite.metrics.metric import MeasuredRun, OpenMetric, StepResult, values_of
from titanlite.metrics.parameters import ParameterMetrics, ParameterStatistics
from titanlite.metrics.probe import ProbeMetrics
from titanlite.metrics.profiling import Profiler
from titanlite.metrics.silent_faults import REMEDY, Fault, check_same_devices, find_wrong_ranks
from titanlite.metrics.sinks.base import ALL_DONE, STOPPED
from titanlite.metrics.sinks.console import task_accuracies
from titanlite.metrics.slow_ranks import SlowRanks
from titanlite.metrics.step_times import StepTimes
from titanlite.metrics.token_metrics import TokenMetrics
from titanlite.metrics.token_statistics import TokenStatistics
from titanlite.metrics.training import CompileMetrics, ModelMetrics, TrainingMetrics
from titanlite.metrics.weights_digest import WeightsDigest
from titanlite.optim.ema import WeightAverage
from titanlite.parallel.clip import Clipper
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime.environment import notes_folder, restart_began
from titanlite.runtime.runtime import Runtime
from titanlite.runtime.signals import Stopped, StopRequests
from titanlite.runtime.slow_node import note_slow
from titanlite.start import Parts
from titanlite.tasks.requests import task_metrics


@dataclass
class Run:
    """The objects of a run. Leaving its context closes the loader and the sinks; after an error, it waits for
    a save in flight first."""

    parts: Parts
    rt: Runtime
    loader: Loader[Any]
    model: ShardedModel
    clipper: Clipper
    state: TrainState
    checkpoints: Checkpointer
    meter: Meter
    guard: StepGuard
    job: Job = field(init=False)
    metrics: list[OpenMetric] = field(init=False)

    def __post_init__(self) -> None:
        self.job = self.parts.job
        if self.job.guard.fault_check_freq:
            check_same_devices(self.rt)
        self.metrics = self.open_metrics()

    @property
    def average(self) -> WeightAverage:
        """The average of the weights, which is without tensors if ema.enable = false."""
        assert self.state.average is not None
        return self.state.average

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.rt.note_error(error)  # first, because the launcher may end this rank during the wait
            self.checkpoints.close_after_error(error)
        self.loader.close()
        self.meter.sinks.event(self.state.step, "ended", {"reason": self._reason(error)})
        self.meter.sinks.close()
        if error is not None and is_out_of_memory(error):
            raise OutOfMemory(explain(f"in step {self.state.step}, {phase(trace)}", error)) from error

    def _reason(self, error: BaseException | None) -> str:
        """Why the process ends. Its event is the last sign of life, with which `titanlite report` tells an
        end from a kill."""
        if error is not None:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ALL_DONE if self.state.step >= self.job.training.steps else STOPPED

    def profiler(self) -> Profiler:
        """The profiler of the steps that [profiling] chooses."""
        folder, steps = self.job.folder / "profile", self.job.training.steps
        untimed = partial(self.meter.untimed, "time/profiling_s")
        return Profiler(self.job.profiling, folder, self.rt.rank, self.state.step + 1, steps, untimed)

    def end_without_data(
        self, error: Stopped | LoaderError | ConfigError, num_steps: int, requests: StopRequests
    ) -> int:
        """End a run that gets no more batches. A run on one rank saves the last finished step; with several
        ranks that is not possible, because some ranks may be waiting in a collective. Raises `error`, or
        returns the exit code if the run was asked to stop after at least one step. `num_steps`: number of
        steps taken since the start of the program."""
        step = self.state.step
        can_save = self.rt.world_size == 1 and num_steps and self.job.checkpoint.enable
        if can_save and not self.checkpoints.has(step):
            self.save()
        if not isinstance(error, Stopped) or not num_steps:
            raise error
        return self.finish({}, num_steps, requests)

    def finish(self, evaluation: dict[str, Any], num_steps: int, requests: StopRequests) -> int:
        """Wait for the last save and log the outcome of the run. Returns the exit code.

        `evaluation`: the metrics of a validation after the last step. `num_steps`: number of steps taken
        since the start of the program; if it is 0, the run was finished before and is evaluated again."""
        job = self.job
        requests.done()
        if reason := self.read_guard():
            raise Diverged(reason)
        self.checkpoints.close()
        self.report_saves()
        if self.state.step < job.training.steps:
            if not job.checkpoint.enable:
                logger.warning(
                    f"stopped after step {self.state.step}; nothing is saved: checkpoint.enable = false"
                )
                return 130
            logger.info(f"stopped after step {self.state.step}, which is saved; run it again to continue")
            return Stopped.exit_code
        if num_steps <= 0:
            logger.info(
                f"nothing to train: step {self.state.step} is done; raise --training.steps to continue"
            )
            evaluation = self.validate(keep=False) if job.validation.enable else {}
            self.sample(keep=False)
        if "eval/loss" in evaluation:
            logger.info(
                f"validation loss {evaluation['eval/loss']:.4f} over {evaluation['eval/tokens']:,} tokens"
            )
        if self.parts.tasks and evaluation:
            logger.info(f"accuracy in tasks: {task_accuracies(evaluation)}")
        logger.info(f"metrics      {job.folder / 'metrics.jsonl'}")
        if "tensorboard" in self.meter.sinks.writers:
            logger.info(f"tensorboard  {job.folder / 'tb'}")
        if job.checkpoint.enable:
            logger.info(f"checkpoints  {job.folder / job.checkpoint.folder}")
        return 0

    def first_step_done(self) -> None:
        """Shorten the timeout of collectives and prepare the first save, now that the step is compiled and
        its memory allocated. After a restart, report the time since the failure."""
        if (began := restart_began()) is not None:
            self.rt.synchronize()
            seconds = round(time.monotonic() - began, 3)
            logger.info(
                f"step {self.state.step} is done, {seconds:.1f} s after a rank failed or the nodes changed"
            )
            self.meter.sinks.event(self.state.step, "recovered", {"seconds": seconds})
        self.rt.first_step_done()
        self.checkpoints.warm_up(self.state)

    def read_guard(self, leave: int = 0) -> str | None:
        """Report skipped steps and spikes to the sinks; the newest `leave` steps are not read yet. Returns
        the reason if training has diverged: too many steps in a row were not finite, or the last step of the
        run was not, or a spike is to end the run. A spike that the last step makes certain ends the run, too:
        there is no step left in which it could rewind."""
        for step, event, about in self.guard.read(leave):
            self.meter.sinks.event(step, event, about)
        is_over = leave == 0 and self.state.step >= self.job.training.steps
        ends_badly = self.guard.ended_in_streak() or self.guard.must_rewind
        if self.guard.diverged or (is_over and ends_badly):
            return self.guard.reason()
        return None

    def go_back(self, error: Diverged) -> Diverged:
        """After training has diverged, make the newest healthy checkpoint the newest of the run folder, so
        that the same command does not continue from the diverged weights. Returns the error with advice to
        the user. The sequences that the run has skipped after rewinds are named, because an older checkpoint
        does not have them. Collective."""
        spike = self.guard.sequences_of_spike()
        skipped = (self.state.skipped | SkippedSequences.merge(spike)).as_lists()
        options = [f"--data.skip_sequences='{skipped}'"] if skipped else []
        options += [] if spike else ["--optimizer.lr=<a lower one>"]
        remedy = f"change something, for example: {' '.join(options)}"
        # Loss and gradient norm of the first bad step are computed with the weights of the step before, which
        # may have diverged although they are finite.
        bad_step = self.guard.first_bad_step()
        advice = self.checkpoints.go_back(None if bad_step is None else bad_step - 2, remedy)
        self.report_saves()
        return Diverged(f"{error}; {advice}")

    def check_for_faults(self, micro_batches: Sequence[Batch], num_targets: torch.Tensor) -> None:
        """If a check for silent faults is due, let all ranks compute one micro-batch again, with the weights
        after the step; the state of the run does not change. If results differ in any bit, choose a
        checkpoint that is not newer than the check before for the next start, and raise SilentFault.
        Collective."""
        guard, step = self.job.guard, self.state.step
        if not guard.fault_check_is_due(step, self.job.training.steps):
            return
        number, since = step // guard.fault_check_freq, guard.fault_check_before(step)
        with self.meter.untimed("time/fault_check_s"):
            wrong = find_wrong_ranks(self.model, self.rt, micro_batches[0], num_targets, number)
        if not wrong:
            return
        fault = Fault(step, since, wrong)
        self.meter.sinks.event(step, "fault", fault.about())
        advice = self.checkpoints.go_back(since, REMEDY)
        self.report_saves()
        raise SilentFault(f"{fault}; {advice}")

    def rewind(self) -> None:
        """After a spike, go back to the newest healthy checkpoint that is at least guard.rewind_margin steps
        older, and skip the sequences of the spike for good. Raises Diverged if there is no such checkpoint,
        and ConfigError if a source is too small for the skipped sequences. Collective."""
        config, guard, state, spike = self.job.guard, self.guard, self.state, self.guard.spike
        assert spike is not None
        first, last = guard.sequences_of(spike.start_step, spike.detected_step)
        step, num_rewinds = state.step, guard.num_rewinds + 1
        with self.meter.untimed("time/rewind_s"):
            latest = spike.start_step - config.rewind_margin
            if not self.checkpoints.rewind(latest, state):
                raise Diverged(
                    f"{guard.reason()}; no healthy checkpoint of step {max(latest, 0)} or earlier exists, to "
                    f"which guard.rewind_margin = {config.rewind_margin} allows to rewind"
                )
            guard.num_rewinds = num_rewinds
            self.model.weights_changed()
            state.skipped |= SkippedSequences.merge([(first, last)])
            self.loader.load_state_dict({"sequences": state.num_sequences}, state.skipped)
        text = (
            f"rewound from step {step} to step {state.step}; the sequences {first} to {last} are skipped for "
            f"good (rewind {num_rewinds} of at most {config.max_rewinds})"
        )
        logger.info(text)
        about = {"from_step": step, "first_sequence": first, "last_sequence": last, "rewinds": num_rewinds}
        self.report_saves()  # before the event, because they belong to the steps that are taken again
        self.meter.sinks.event(state.step, "rewound", {**about, "text": text})
        self.check_epochs()

    def last_sequence(self) -> int:
        """The position in the data order after the steps that are left."""
        state = self.state
        return self.parts.stages.last_sequence(state.step, state.num_sequences, state.skipped)

    def check_epochs(self) -> None:
        """Raises ConfigError if the steps that are left read a source for more than its max_epochs. They read
        further than at the start of the run, by the sequences that it has skipped since."""
        state = self.state
        try:
            self.parts.sequences.describe(self.last_sequence())
        except ConfigError as e:
            raise ConfigError(f"after the rewind to step {state.step}: {e}", e.key) from None

    def report_saves(self) -> None:
        """Tell the sinks which checkpoints have become complete."""
        for step in self.checkpoints.newly_committed():
            self.meter.sinks.event(step, "saved")

    def save(self) -> None:
        """Save a checkpoint of the step that was just taken."""
        with self.meter.untimed("checkpoint/stall_s"):
            self.state.stream = self.loader.stream_state(self.rt.ranks.all_gather)
            self.checkpoints.save(self.state)

    def copy_to_memory(self) -> None:
        """Copy the state after the step that was just taken to the memory of the nodes."""
        with self.meter.untimed("checkpoint/copy_s"):
            self.state.stream = self.loader.stream_state(self.rt.ranks.all_gather)
            self.checkpoints.copy(self.state)

    def open_metrics(self) -> list[OpenMetric]:
        """The metrics of the run: those that are always on, and the ones that [[metrics.extra]] adds.
        Collective."""
        job, rt, model, state, sinks = self.job, self.rt, self.model, self.state, self.meter.sinks
        probe_is_due = partial(job.metrics.probe_is_due, last_step=job.training.steps)
        statistics = ParameterStatistics(model.net, state.optimizer, job.optimizer, rt.ranks)
        loads, learning_rate = model.expert_loads, partial(job.learning_rate, self.parts.stages)
        extra = MeasuredRun(model=model, optimizer=state.optimizer, rt=rt, tokenizer=self.parts.tokenizer)
        metrics: list[OpenMetric] = [
            TrainingMetrics(state, self.guard, rt.ranks, learning_rate, self.remaining_tokens),
            ModelMetrics(model, rt.ranks),
            ExpertMetrics(loads, sinks),
            CompileMetrics(),
            SlowRanks(rt.ranks, partial(note_slow, notes_folder(), rt.ranks.rank)),
            ParameterMetrics(statistics, self.clipper, sinks, rt.ranks),
            TokenMetrics(rt),
            StepTimes(rt.ranks),
            Hardware(rt.ranks),
            ProbeMetrics(model, sinks, probe_is_due, self.meter.untimed),
            *(metric.build(extra) for metric in job.metrics.extra),
        ]
        if job.metrics.digest_freq:
            metrics.append(WeightsDigest(model.net, rt, job.metrics.digest_is_due, self.meter.untimed))
        return metrics

    def measure(self, step: StepResult) -> dict[str, Any]:
        """The values of all metrics in a step. Raises ConfigError if two metrics report under one name. Waits
        for the device. Collective."""
        values = dict[str, Any]()
        for metric in self.metrics:
            new = values_of(metric, step)
            if both := values.keys() & new.keys():
                raise ConfigError(f"two metrics report the name {min(both)!r}", "metrics.extra")
            values |= new
        return values

    def remaining_tokens(self) -> int:
        """Tokens of the sequences that the run has left."""
        return (self.last_sequence() - self.state.num_sequences) * self.job.training.seq_len

    def token_statistics(self, step_size: StepSize) -> TokenStatistics | None:
        """Empty statistics of the step's token losses, which forward_backward fills; None if the step has no
        detailed report."""
        if not self.job.metrics.detail_is_due(self.state.step, self.job.training.steps):
            return None
        return TokenStatistics(
            seq_len=self.job.training.seq_len,
            num_micro_batches=self.rt.batch.num_micro_batches(step_size.global_batch_size),
            sources=self.parts.sequences.source_names,
            is_cross_entropy=self.job.loss.is_cross_entropy,
            device=self.rt.device,
        )

    def validate(self, keep: bool = True) -> dict[str, Any]:
        """The metrics of a validation on the held-out sequences and on the tasks. With `keep`, append the
        tasks' samples to samples.txt. Collective."""
        sequences, metrics = self.parts.sequences, dict[str, Any]()
        num_sequences = self.job.validation.num_sequences(sequences.num_held_out, self.rt.batch.global_size)
        if num_sequences:
            with self.meter.untimed("time/validation_s"):
                metrics = validate(self.model, sequences, num_sequences, self.rt, self.bytes_per_token)
                if self.job.ema.enable:
                    with self.averaged_weights():
                        averaged = validate(self.model, sequences, num_sequences, self.rt)
                    metrics["eval/ema_loss"] = averaged["eval/loss"]
                    metrics["eval/ema_perplexity"] = averaged["eval/perplexity"]
        return metrics | (self.score_tasks(keep) if self.parts.tasks else {})

    def score_tasks(self, keep: bool) -> dict[str, float]:
        """The metrics of the tasks. With `keep`, append their samples to samples.txt. Collective."""
        batch_tokens = self.rt.batch.micro_batch_size * self.job.training.seq_len
        vocab_size = self.parts.tokenizer.vocab_size
        with self.meter.untimed("time/tasks_s"):
            by_task = score_tasks(self.model, self.parts.tasks, vocab_size, batch_tokens, self.rt)
            metrics = task_metrics(self.parts.tasks, by_task)
            for task, scores in zip(self.parts.tasks, by_task):
                if keep and (text := task.sample(scores)):
                    self.meter.sinks.sample(self.state.step, text)
            if self.job.ema.enable:
                with self.averaged_weights():
                    by_task = score_tasks(self.model, self.parts.tasks, vocab_size, batch_tokens, self.rt)
                metrics |= task_metrics(self.parts.tasks, by_task, "ema_")
        return metrics

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """In the body, the model has the average of the weights."""
        with self.average.as_weights():
            self.model.weights_changed()
            yield
        self.model.weights_changed()

    @cached_property
    def bytes_per_token(self) -> np.ndarray | None:
        """The tokenizer's bytes_per_token, for validation."""
        return self.parts.tokenizer.bytes_per_token()

    def sample(self, keep: bool = True) -> None:
        """Log a sample for each prompt and, with `keep`, append it to samples.txt. Collective."""
        generation = self.job.generation
        with self.meter.untimed("time/generation_s"):
            for i, prompt in enumerate(generation.prompts):
                seed, device = self.job.training.seed + i, self.rt.device
                try:
                    text = generate(self.model.logits, self.parts.tokenizer, prompt, generation, seed, device)
                except Diverged as e:  # the guard decides whether the run continues
                    logger.info(f"no sample at step {self.state.step}: {e}")
                    return
                logger.info(f"sample at step {self.state.step}:\n{text}")
                if keep:
                    self.meter.sinks.sample(self.state.step, text)
