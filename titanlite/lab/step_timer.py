"""Times of training steps on this machine, on random tokens, as the trainer takes them on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from titanlite.lab.coordinate_check import SmallRun
from titanlite.models.base import Decoder
from titanlite.optim.base import guarded_step, set_lr
from titanlite.optim.ema import WeightAverage
from titanlite.parallel.clip import grad_norms
from titanlite.parallel.settings import ParallelSettings

WARM_UP, ROUNDS = 3, 5
ROUND_S, MAX_STEPS = 0.3, 20  # of a round
SLOW_S = 4.0  # seconds of a step from which on one step is measured, after one for warming up


def time_steps(net: Decoder, trial: SmallRun, settings: ParallelSettings) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward, and of the optimizer with clipping, in the
    fastest of several rounds, because whatever else runs on the machine only adds time. One step takes all
    batches of `trial`. `net`: on the meta device. The device must be CUDA or the CPU, which StepClock
    measures."""
    device, clock = trial.device, settings.clock
    model, stepper, clipper = trial.start(net, settings)
    set_lr(stepper, 0.0)  # the weights stay, so that no loss overflows
    average = WeightAverage(trial.job.ema, model.net)
    batches = [batch.to(device) for batch in trial.batches]
    num_targets = torch.tensor(sum(batch.num_targets for batch in batches), device=device)

    def take_steps(num: int) -> tuple[float, float]:
        clock.clear()
        for step in range(1, num + 1):
            clock.begin(step, measured=True)
            loss = model.forward_backward(batches, num_targets)
            clock.enter("optimizer")
            norms = grad_norms(model.net)
            apply = norms.total.isfinite() & loss.isfinite()
            guarded_step(stepper, apply, clipper.clip(norms, apply, step))
            stepper.zero_grad()
            model.after_step(apply)
            average.update(step, apply)
            clock.end()
        times = clock.times()
        assert times is not None
        phases = times.phases  # CUDA graphs have one phase for forward and backward
        model_s = sum(phases.get(phase, 0.0) for phase in ("forward", "backward", "forward_backward"))
        return model_s / len(batches), phases["optimizer"]

    take_steps(1)  # compiles
    began = time.perf_counter()
    first = take_steps(1)
    step_s = time.perf_counter() - began
    if step_s > SLOW_S:
        return first
    take_steps(WARM_UP)
    num = min(max(int(ROUND_S / step_s), 1), MAX_STEPS)
    rounds = [take_steps(num) for _ in range(ROUNDS)]
    return min(r[0] for r in rounds), min(r[1] for r in rounds)


def seconds_of(function: Callable[[], object], synchronize: Callable[[], None], num: int = 10) -> float:
    """The mean seconds of `num` calls of `function`, after three for warming up. `synchronize`: waits for the
    device."""
    for _ in range(WARM_UP):
        function()
    synchronize()
    began = time.perf_counter()
    for _ in range(num):
        function()
    synchronize()
    return (time.perf_counter() - began) / num
