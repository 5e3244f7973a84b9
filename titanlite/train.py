"""The trainer, in the order in which a run executes it: `main` reads the TOML file, `train` opens and closes
the run, `build` makes its data, model and optimizer, and `take_steps` is the training loop, which has
everything that happens in a step, in order.

titanlite train CONFIG.toml [--section.key=value ...]        one process
NGPU=8 ./run_train.sh CONFIG [--section.key=value ...]       one process per GPU, on torchrun
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.checkpoint.lock import FolderLock
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.overrides import split_arguments
from titanlite.errors import Diverged, LoaderError
from titanlite.job import Job, load_job
from titanlite.metrics.metric import StepResult
from titanlite.metrics.profiling import Profiler
from titanlite.optim.base import guarded_step, set_lr
from titanlite.parallel.clip import grad_norms
from titanlite.run import Run
from titanlite.runtime.compile_cache import use_compile_cache
from titanlite.runtime.data_wait import DataWait
from titanlite.runtime.process import world_size
from titanlite.runtime.runtime import Runtime, runtime
from titanlite.runtime.signals import Stopped, StopRequests, stop_requests
from titanlite.start import (
    assemble,
    decide_start,
    load_state,
    log_steps,
    open_checkpoints,
    open_loader,
    open_memory,
    open_meter,
    shard_model,
    write_run_files,
)
from titanlite.start_log import log_changes, log_start


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
    0; 75 if the run was asked to stop, with nothing lost; 130 if it was asked to stop and saves no
    checkpoints. Raises Diverged if training has diverged: after too many non-finite steps in a row, or after
    a spike that is to end the run; and SilentFault if a GPU computes wrong numbers."""
    with (
        stop_requests() as requests,
        runtime(job.training, job.parallelism, job.comm, job.folder / job.checkpoint.folder) as rt,
        FolderLock(job.folder) as lock,
        build(job, rt, lock) as run,
        run.profiler() as profiler,
    ):
        try:
            return take_steps(run, requests, profiler)
        except Diverged as e:
            raise run.go_back(e) from None


def build(job: Job, rt: Runtime, lock: FolderLock) -> Run:
    """Build the data, the model and the optimizer of the run, and load the checkpoint that it resumes from.
    Cheap compatibility checks run first; the run folder is not written to until they have passed."""
    use_compile_cache(job.compile.cache_dir, job.compile.enable, rt.device, job.folder)
    model, kernel = shard_model(job, rt)
    memory = open_memory(job, rt.ranks)
    start = decide_start(job, rt.ranks, lock, memory)
    parts = assemble(job, rt.world_size, rt.ranks, start)
    checkpoints = open_checkpoints(parts, rt, start, lock, memory, kernel)
    log_start(parts.job, rt, parts.about, parts.sequences, kernel)
    state, guard, clipper = load_state(parts, rt, model, checkpoints)
    resumed = checkpoints.candidate
    changes = log_changes(parts.job, rt, resumed, parts.stages, state)
    write_run_files(parts, rt, state.step)
    log_steps(parts, start, resumed)
    return Run(
        parts=parts,
        rt=rt,
        meter=open_meter(parts, rt, state.step, changes),
        loader=open_loader(parts, rt, state),
        model=model,
        clipper=clipper,
        state=state,
        checkpoints=checkpoints,
        guard=guard,
    )


def take_steps(run: Run, requests: StopRequests, profiler: Profiler) -> int:
    """The training loop: take all steps that are left, and end the run. Returns its exit code."""
    job, rt, model, state, optimizer = run.job, run.rt, run.model, run.state, run.state.optimizer
    loader, meter, checkpoints, guard = run.loader, run.meter, run.checkpoints, run.guard
    last_step, num_steps = job.training.steps, 0  # num_steps: steps taken since the start of the program
    stop, evaluation = False, dict[str, Any]()
    loader.while_waiting = DataWait(rt, requests, lambda: num_steps == 0)
    requests.begin(job.folder / "STOP" if rt.rank == 0 else None)

    while state.step < last_step and not stop:
        try:
            with meter.waiting_for_data(state.step + 1):
                step_size, micro_batches = loader.next_step(rt.device)
        except (Stopped, LoaderError, ConfigError) as e:
            return run.end_without_data(e, num_steps, requests)
        state.step, num_steps, first_sequence = state.step + 1, num_steps + 1, state.next_sequence
        set_lr(optimizer, run.parts.stages.lr_factor(state.step, first_sequence))
        job.optimizer.set_scheduled(optimizer, state.step)
        num_targets = rt.ranks.count(sum(batch.num_targets for batch in micro_batches))
        save_asked, failed, busy = requests.take_save_request(), checkpoints.failed, checkpoints.busy
        vote = rt.ranks.vote(requests.stop, save_asked, failed, busy)
        details = run.token_statistics(step_size)  # None without a detailed report
        loss = model.forward_backward(micro_batches, num_targets, details)
        rt.clock.enter("optimizer")
        norms = grad_norms(model.net, rt.mesh)
        loss, *sums = rt.ranks.sum_scalars(loss, *guard.summands(norms.total))
        next_sequence = loader.state_dict()["sequences"]
        apply = guard.judge(loss, norms.total, sums, state.step, first_sequence, next_sequence, num_targets)
        checkpoints.wait_until_staged()  # a save may still be copying the weights
        guarded_step(optimizer, apply, run.clipper.clip(norms, apply, state.step))
        optimizer.zero_grad()
        model.after_step(apply)
        run.average.update(state.step, apply)
        state.step_done(next_sequence, num_targets)
        meter.step_done(step_size)
        profiler.step_done()
        rt.collect_garbage(state.step)
        if num_steps == 1:
            run.first_step_done()
        if reason := run.read_guard(leave=1):  # the newest step's decision would wait for the device
            raise Diverged(reason)
        if guard.must_rewind:
            run.rewind()
            continue

        run.check_for_faults(micro_batches, num_targets)
        evaluation = run.validate() if job.validation.is_due(state.step, last_step) else {}
        if job.generation.is_due(state.step, last_step):
            run.sample()
        stop, save_now, save_failed, busy = vote.result()  # true on all ranks if true on any
        if evaluation or stop or num_steps == 1 or job.metrics.is_due(state.step, last_step):
            result = StepResult(
                state.step, step_size, first_sequence, micro_batches, num_targets, loss, norms, apply, details
            )
            meter.report(state.step, run.measure(result) | evaluation)
        if save_failed:
            checkpoints.check_save()
        if checkpoints.due(state.step, last_step, stop or save_now, guard.in_streak):
            run.save()  # after the step's metrics are written
        elif checkpoints.copy_due(state.step, busy):
            run.copy_to_memory()
        run.report_saves()

    return run.finish(evaluation, num_steps, requests)
