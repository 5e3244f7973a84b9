"""The trainer, in the order in which a run executes it: `main` reads the TOML file, `train` opens and closes
the run, `build` makes its data, model and optimizer, and `take_steps` is the training loop, which has
everything that happens in a step, in order.

titanlite train CONFIG.toml [--section.key=value ...]        one process
NGPU=8 ./run_train.sh CONFIG [--section.key=value ...]       one process per GPU, on torchrun
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.state import TrainState
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.overrides import split_arguments
from titanlite.data.batch import Batch
from titanlite.data.loader import MicroBatches, SequenceDataset, SequenceLoader
from titanlite.errors import Diverged, LoaderError
from titanlite.evaluate import validate
from titanlite.generate import generate
from titanlite.interop.initial import load_initial
from titanlite.job import Job, load_job
from titanlite.log import logger
from titanlite.metrics.guard import StepGuard
from titanlite.metrics.memory import OutOfMemory, building, explain, phase
from titanlite.metrics.meter import Meter
from titanlite.metrics.profiling import Profiler
from titanlite.optim.base import guarded_step, set_lr
from titanlite.parallel.apply import parallelize
from titanlite.parallel.clip import clip_divisor, grad_norm
from titanlite.parallel.compile import Compilations
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime.data_wait import DataWait
from titanlite.runtime.process import world_size
from titanlite.runtime.runtime import Runtime, runtime
from titanlite.runtime.signals import Stopped, StopRequests, stop_requests
from titanlite.startup import (
    annotated,
    check_device,
    check_global_batch,
    check_interop,
    check_run_folder,
    describe,
    exporter,
    flops_of,
    learning_rate,
    log_changes,
    open_meter,
    open_tokenizer,
    parallel_settings,
    record,
    resolved,
)
from titanlite.tokenizers.base import Tokenizer


def main(argv: Sequence[str]) -> int:
    """`titanlite train`: the path of a TOML file, and overrides. Returns the exit code."""
    path, overrides = split_arguments(argv)
    job = load_job(path, overrides, world_size(), allow_imports=True)
    try:
        return train(job)
    except ConfigError as e:  # add the line of the TOML file that has the wrong value
        raise toml.read(path, overrides)[1].located(e) from None


def train(job: Job) -> int:
    """Train until step `training.steps`; resume if the run folder holds a checkpoint. Returns the exit code:
    0, or 75 if the run was asked to stop and has saved. Raises Diverged after too many non-finite steps in a
    row."""
    with (
        stop_requests() as requests,
        runtime(job.training, job.parallelism, job.comm) as rt,
        build(job, rt, requests) as run,
        run.profiler() as profiler,
    ):
        return take_steps(run, requests, profiler)


def build(job: Job, rt: Runtime, requests: StopRequests) -> Run:
    """Build the data, the model and the optimizer of the run, and load the checkpoint that it resumes from.
    Cheap compatibility checks run first; the run folder is not written to until they have passed."""
    attention, kernel = check_device(job, rt.device, rt.param_dtype, rt.world_size)
    tokenizer = open_tokenizer(job)
    with torch.device("meta"):
        net = job.model.build()
    job.optimizer.check(net)
    flops, num_parameters = flops_of(job, net), sum(p.numel() for p in net.parameters())
    about = resolved(job, net, tokenizer.vocab_size)
    model = parallelize(net, job.loss, rt.mesh, parallel_settings(job, rt, attention))

    with rt.rank_zero_first():
        check_run_folder(job, tokenizer)  # before job.data.build, which may take long to tokenise and pack
        if rt.rank == 0:  # an error is raised on every rank
            check_interop(job, tokenizer)
        sequences = job.data.build(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)
    identity = job.identity(sequences.identity, sequences.names)
    rt.check_equal("data, tokenizer or model", json.dumps(identity, sort_keys=True))
    # Raises ConfigError if the run folder holds a run with another identity.
    exports = exporter(job, tokenizer, requests)
    checkpoints = Checkpointer(job.checkpoint, job.folder, identity, annotated(job, about), exports)
    check_global_batch(job, rt.batch.global_size, checkpoints.resumed)

    describe(job, rt, about, sequences, kernel)
    with building(num_parameters, rt.mesh.shards):
        model.materialize(rt.device, job.training.seed)
        optimizer = job.optimizer.build(model.net, rt.mesh)
        state = TrainState(step=0, sequences=0, tokens=rt.count(0))
        if checkpoints.resumed is None and job.checkpoint.initial_load_path:
            load_initial(Path(job.checkpoint.initial_load_path), job.model, model.net, checkpoints.ranks)
        checkpoints.load(model.net, optimizer, state)
        model.weights_changed()
        guard = StepGuard(job.guard, rt.device)
        if checkpoints.resumed is not None:
            guard.load_state_dict(checkpoints.resumed["guard"], state.step)
    # Again, because load() may have fallen back to an older checkpoint with another batch size.
    check_global_batch(job, rt.batch.global_size, checkpoints.resumed)
    order = MicroBatches(0, rt.batch.global_size, rt.batch.micro_batch_size, rt.mesh.dp_rank, rt.mesh.dp_size)
    loader = SequenceLoader(sequences, order, job.data.num_workers, pin_memory=rt.device.type == "cuda")
    loader.load_state_dict({"sequences": state.sequences})

    log_changes(job, rt, checkpoints)
    record(job, rt, sequences, state, checkpoints)
    meter = open_meter(job, rt, flops, state.step)
    return Run(job, rt, tokenizer, sequences, loader, model, optimizer, state, checkpoints, meter, guard)


def take_steps(run: Run, requests: StopRequests, profiler: Profiler) -> int:
    """The training loop: take all steps that are left, and end the run. Returns its exit code."""
    job, rt, model, optimizer, state = run.job, run.rt, run.model, run.optimizer, run.state
    loader, meter, checkpoints, guard = run.loader, run.meter, run.checkpoints, run.guard
    first_step, last_step = state.step + 1, job.training.steps
    stop, evaluation = False, dict[str, Any]()
    loader.while_waiting = DataWait(rt, requests, lambda: state.step < first_step)
    requests.begin(job.folder / "STOP" if rt.rank == 0 else None)

    while state.step < last_step and not stop:
        try:
            with meter.waiting_for_data():
                micro_batches = [next(loader).to(rt.device) for _ in range(rt.batch.num_micro_batches)]
        except (Stopped, LoaderError) as e:
            return run.end_without_data(e, first_step, requests)
        state.step += 1
        set_lr(optimizer, job.lr_scheduler.checked_factor(state.step, last_step))
        tokens = rt.count(sum(batch.num_targets for batch in micro_batches))
        vote = rt.vote(requests.stop, requests.take_save(), checkpoints.failed)
        loss = model.forward_backward(micro_batches, tokens)
        norm = grad_norm(model.net.parameters(), rt.mesh.pp)
        loss, bad_norms = rt.sum_scalars(loss, ~norm.isfinite())
        ok = guard.judge(loss, norm, bad_norms, state.step, state.sequences, rt.batch.global_size)
        checkpoints.wait_until_staged()  # a save may still be copying the weights
        guarded_step(optimizer, ok, clip_divisor(norm, job.training.max_norm))
        optimizer.zero_grad()
        model.after_step(ok)
        state.consumed(loader.state_dict(), tokens)
        meter.step_done()
        profiler.step_done()
        rt.collect_garbage(state.step)
        if state.step == first_step:
            run.first_step_done()
        run.read_guard(leave=1)  # reading the newest step's decision would wait for the device

        evaluation = {}
        if job.validation.enable and due(job.validation.freq, state.step, last_step):
            evaluation = run.validate()
        if due(job.generation.freq, state.step, last_step):
            run.sample()
        stop, save_now, save_failed = vote.result()  # true on all ranks if true on any
        logged = evaluation or stop or state.step == first_step
        if logged or due(job.metrics.log_freq, state.step, last_step):
            meter.report(state.step, run.values(loss, norm, micro_batches) | evaluation)
        if save_failed:
            checkpoints.wait_for_save()
        if checkpoints.due(state.step, last_step, stop or save_now, guard.in_streak):
            run.save()  # after the step's metrics are written

    return finish(run, evaluation, num_steps=state.step - first_step + 1, requests=requests)


def finish(run: Run, evaluation: dict[str, Any], num_steps: int, requests: StopRequests) -> int:
    """Wait for the last save and log the outcome of the run. Returns the exit code. `evaluation`: the metrics
    of a validation after the last step. `num_steps`: number of steps taken since the start of the program; if
    it is 0, the run was finished before and is evaluated again."""
    job = run.job
    run.checkpoints.close(is_over=run.state.step >= job.training.steps)
    requests.done()
    run.read_guard()
    if run.state.step < job.training.steps:
        if not job.checkpoint.enable:
            logger.warning(
                f"stopped after step {run.state.step}; nothing is saved: checkpoint.enable = false"
            )
            return 130
        logger.info(f"stopped after step {run.state.step}, which is saved; run it again to continue")
        return Stopped.exit_code
    if num_steps <= 0:
        logger.info(f"nothing to train: step {run.state.step} is done; raise --training.steps to continue")
        evaluation = run.validate() if job.validation.enable else {}
        run.sample(keep=False)
    if evaluation:
        logger.info(
            f"validation loss {evaluation['eval/loss']:.4f} over {evaluation['eval/tokens']:,} tokens"
        )
    logger.info(f"metrics      {job.folder / 'metrics.jsonl'}")
    if "tensorboard" in run.meter.sinks.writers:
        logger.info(f"tensorboard  {job.folder / 'tb'}")
    if job.checkpoint.enable:
        logger.info(f"checkpoints  {job.folder / job.checkpoint.folder}")
    return 0


def due(freq: int, step: int, last_step: int) -> bool:
    """Whether `step` is the last step or a multiple of `freq`; 0 has no multiples."""
    return step == last_step or (freq > 0 and step % freq == 0)


@dataclass
class Run:
    """The objects of a run. Leaving its context closes the loader and the sinks; after an error, it waits for
    a save in flight first."""

    job: Job
    rt: Runtime
    tokenizer: Tokenizer
    sequences: SequenceDataset
    loader: SequenceLoader
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    state: TrainState
    checkpoints: Checkpointer
    meter: Meter
    guard: StepGuard
    compilations: Compilations = field(default_factory=Compilations)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.rt.note_error(error)  # first, because the launcher may end this rank during the wait
            self.checkpoints.close_after_error(error)
        self.loader.close()
        self.meter.sinks.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(explain(f"in step {self.state.step}, {phase(trace)}")) from error

    def profiler(self) -> Profiler:
        """The profiler of the steps that [profiling] chooses."""
        folder, steps = self.job.folder / "profile", self.job.training.steps
        apart = partial(self.meter.apart, "time/profiling_s")
        return Profiler(self.job.profiling, folder, self.rt.rank, self.state.step + 1, steps, apart)

    def end_without_data(self, error: Stopped | LoaderError, first_step: int, requests: StopRequests) -> int:
        """End a run that gets no more batches. A run on one rank saves the last finished step; with several
        ranks that is not possible, because some ranks may be waiting in a collective. Raises `error`, or
        returns the exit code if the run was asked to stop after at least one step."""
        step, num_steps = self.state.step, self.state.step - first_step + 1
        can_save = self.rt.world_size == 1 and num_steps and self.job.checkpoint.enable
        if can_save and not self.checkpoints.has(step):
            self.save()
        if isinstance(error, LoaderError) or not num_steps:
            raise error
        return finish(self, {}, num_steps, requests)

    def first_step_done(self) -> None:
        """Shorten the timeout of collectives and prepare the first save, now that the step is compiled and
        its memory allocated."""
        self.rt.first_step_done()
        self.checkpoints.warm_up(self.model.net, self.optimizer)

    def read_guard(self, leave: int = 0) -> None:
        """Report skipped steps to the sinks; the newest `leave` steps are not read yet. Raises Diverged if
        too many steps in a row were skipped, or the last step of the run was."""
        for step in self.guard.read(leave):
            self.meter.sinks.event(step, "skipped")
        is_over = leave == 0 and self.state.step >= self.job.training.steps
        if self.guard.diverged or (is_over and self.guard.ended_in_streak(self.state.step)):
            raise Diverged(f"{self.guard.reason()}; {self.checkpoints.recovery_advice()}")

    def save(self) -> None:
        """Save a checkpoint of the step that was just taken."""
        self.meter.sinks.event(self.state.step, "saving")
        with self.meter.apart("checkpoint/stall_s"):
            self.checkpoints.save(self.model.net, self.optimizer, self.state, self.small_state())

    def values(
        self, loss: torch.Tensor, norm: torch.Tensor, micro_batches: Sequence[Batch]
    ) -> dict[str, Any]:
        """The metrics of a step, without the times that the meter adds. Waits for the device. Collective."""
        return {
            "train/loss": loss.item(),
            "train/grad_norm": norm.item(),
            "train/skipped_steps": self.guard.skipped_steps(),
            "train/learning_rate": learning_rate(self.job, self.state.step),
            "progress/total_tokens": int(self.state.tokens),
            "data/batch_sha": self.rt.sum_u64(sum(batch.sha for batch in micro_batches)),
            **self.model_metrics(),
            **self.compilations.since_last(),
        }

    def model_metrics(self) -> dict[str, float]:
        """The model's auxiliary losses and statistics in this step. Waits for the device. Collective."""
        shares = {f"train/{name}": value for name, value in self.model.auxiliary_losses.items()}
        for name, value in self.model.net.statistics().items():
            shares[f"model/{name}"] = value / self.rt.world_size
        sums = self.rt.sum_scalars(*shares.values()) if shares else ()
        return {key: value.item() for key, value in zip(shares, sums)}

    def small_state(self) -> dict[str, Any]:
        """The entries of train.json besides those of TrainState. Waits for the device."""
        guard = self.guard.state_dict()
        return {
            "global_batch_size": self.rt.batch.global_size,
            "guard": guard,
            "healthy": guard["streak"] == 0,
        }

    def validate(self) -> dict[str, Any]:
        """The validation loss on the held-out sequences. Collective."""
        num_sequences = self.job.validation.num_sequences(
            self.sequences.num_held_out, self.rt.batch.global_size
        )
        with self.meter.apart("time/validation_s"):
            return validate(self.model, self.sequences, num_sequences, self.rt)

    def sample(self, keep: bool = True) -> None:
        """Log a sample for each prompt and, with `keep`, append it to samples.txt. Collective."""
        generation = self.job.generation
        with self.meter.apart("time/generation_s"):
            for i, prompt in enumerate(generation.prompts):
                seed, device = self.job.training.seed + i, self.rt.device
                try:
                    text = generate(self.model.logits, self.tokenizer, prompt, generation, seed, device)
                except Diverged as e:  # the guard decides whether the run continues
                    logger.info(f"no sample at step {self.state.step}: {e}")
                    return
                logger.info(f"sample at step {self.state.step}:\n{text}")
                if keep:
                    self.meter.sinks.sample(self.state.step, text)
