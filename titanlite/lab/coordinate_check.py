"""The coordinate check (Yang et al. 2022, arXiv 2203.03466, appendix D.1): after a few steps of training, the
outputs of the blocks must have changed by an amount that does not depend on the width.

Tokens are random, with Zipf's frequencies, so that a check needs no data and is the same on every machine:
what the first steps learn is the frequencies of the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from titanlite.attention.sdpa import CAUSAL
from titanlite.data.batch import Batch
from titanlite.errors import Diverged
from titanlite.job import Job
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.moe import Router, moe_layers_of
from titanlite.optim.base import guarded_step, set_lr
from titanlite.parallel.apply import parallelize
from titanlite.parallel.clip import Clipper, grad_norms
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel

EMBEDDING, LOGITS, ROUTER = "embedding", "logits", "router"
TOLERANCE, SPAN = 0.1, 8  # the slope that passes if the widest model has 8 times the width of the narrowest
TINY = 1e-30  # in place of an RMS of 0, which has no logarithm
LAST_LR = 0.25  # share of the peak learning rate in the last step, to which the rate rises linearly


@dataclass(frozen=True)
class SmallRun:
    """Training of a job's model on one device, on batches of random tokens. A check takes a step on each
    batch, and measures outputs on the first."""

    job: Job
    batches: Sequence[Batch]
    seed: int
    device: torch.device

    def start(
        self, net: Decoder, settings: ParallelSettings
    ) -> tuple[ShardedModel, torch.optim.Optimizer, Clipper]:
        """Return the model, which is on the meta device, initialised, and what updates it as the trainer does
        on one rank."""
        model = parallelize(net, self.job.loss, ALONE, settings)
        model.materialize(self.device, self.seed)
        optimizer, training = self.job.optimizer.build(model.net, ALONE), self.job.training
        return model, optimizer, Clipper(training.clip, training.max_norm, model.net, optimizer)


class Size(NamedTuple):
    """Root mean square of an output at initialisation, after the steps, and of the difference of the two."""

    initial: float
    final: float
    change: float


class Slopes(NamedTuple):
    """Slopes of log(root mean square) over log(width). `output`: after the steps. None for the logits of the
    head and of routers, whose change may also fall with the width: under the rules, the initial weights add
    width ** -0.5 to both."""

    output: float | None
    change: float

    @property
    def excess(self) -> float:
        """The distance from slopes that are allowed."""
        return max(self.change, 0.0) if self.output is None else max(abs(self.output), abs(self.change))

    def limit(self, widths: Sequence[int]) -> float:
        """The excess that passes. Logits need no room for scatter: under the rules their slopes are below
        0."""
        return TOLERANCE if self.output is None else largest_slope(widths)


def random_batches(num: int, shape: tuple[int, int], vocab_size: int, seed: int) -> list[Batch]:
    """Batches of `shape` = (sequences, tokens). Token i has a frequency proportional to 1 / (i + 1)."""
    sequences, length = shape
    rng = np.random.default_rng(seed)
    frequencies = 1 / np.arange(1, vocab_size + 1)
    tokens = rng.choice(vocab_size, (num, sequences, length + 1), p=frequencies / frequencies.sum())
    batches = torch.from_numpy(tokens)
    return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), sequences * length, 0) for t in batches]


def measured_sizes(trial: SmallRun, step_done: Callable[[], None]) -> dict[str, Size]:
    """Train a new model for one step per batch, and measure the outputs of embedding, blocks and head. Raises
    Diverged if a loss is not finite."""
    job, device = trial.job, trial.device
    net = job.model.build_on_meta()
    job.optimizer.check(net)
    sharded, stepper, clipper = trial.start(net, ParallelSettings(moe=job.moe))
    tokens = trial.batches[0].inputs.to(device)
    before = outputs(sharded.net, tokens)
    for step, batch in enumerate(trial.batches, 1):
        loss = sharded.forward_backward([batch.to(device)], torch.tensor(batch.num_targets, device=device))
        norms = grad_norms(sharded.net)
        apply = norms.total.isfinite() & loss.isfinite()
        if not apply.item():
            raise Diverged(f"width {job.model.config.dim}: the loss of step {step} is not finite")
        set_lr(stepper, LAST_LR * step / len(trial.batches))
        job.optimizer.set_scheduled(stepper, step)
        guarded_step(stepper, apply, clipper.clip(norms, apply, step))
        stepper.zero_grad()
        sharded.after_step(apply)
        step_done()
    after = outputs(sharded.net, tokens)
    return {
        name: Size(_rms(value), _rms(after[name]), _rms(after[name] - value))
        for name, value in before.items()
    }


@torch.no_grad()
def outputs(net: Decoder, tokens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of the embedding, of each block and of the head, and the logits of routers, in fp32."""
    by_name = dict[str, torch.Tensor]()
    blocks = list(net.blocks().items())

    def keep(name: str, value: torch.Tensor) -> None:
        by_name[name] = value.float()

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: keep(name, output)

    def router_hook(name: str) -> Callable[..., None]:
        def hook(router: Router, args: tuple[torch.Tensor, ...]) -> None:
            keep(f"{ROUTER} {name}", router.product(args[0], router.weight))

        return hook

    hooks = [blocks[0][1].register_forward_pre_hook(lambda module, args: keep(EMBEDDING, args[0]))]
    for name, block in blocks:
        hooks += [layer.gate.register_forward_pre_hook(router_hook(name)) for layer in moe_layers_of(block)]
        hooks.append(block.register_forward_hook(hook(f"block {name}")))
    try:
        keep(LOGITS, net(tokens_BT, None, CAUSAL, net.logits))
    finally:
        for handle in hooks:
            handle.remove()
    return by_name


def averaged(sizes: Sequence[Mapping[str, Size]]) -> dict[str, Size]:
    """The geometric means over several seeds."""
    logs = {name: np.log(np.maximum([measured[name] for measured in sizes], TINY)) for name in sizes[0]}
    return {name: Size(*np.exp(values.mean(0)).tolist()) for name, values in logs.items()}


def slopes(sizes: Mapping[int, Mapping[str, Size]]) -> dict[str, Slopes]:
    """The slopes of each output, from its sizes by width."""
    widths = list(sizes)
    names = list(sizes[widths[0]])

    def slope(name: str, key: str) -> float:
        values = [max(getattr(sizes[width][name], key), TINY) for width in widths]
        return float(np.polyfit(np.log(widths), np.log(values), 1)[0])

    def output_slope(name: str) -> float | None:
        return None if name.startswith((LOGITS, ROUTER)) else slope(name, "final")

    return {name: Slopes(output_slope(name), slope(name, "change")) for name in names}


def largest_slope(widths: Sequence[int]) -> float:
    """The largest slope that passes where it should be 0. Sizes scatter by 5 to 17% from seed to seed
    (debug, 128 to 1024), which gives a slope of three seeds an error of 0.04 if the widths span a factor of
    8, and of 0.06 for a factor of 4. So the limit is one of the change over all widths: the change that a
    slope of 0.1 makes over a factor of 8."""
    return TOLERANCE * max(1.0, math.log(SPAN) / math.log(max(widths) / min(widths)))


def _rms(x: torch.Tensor) -> float:
    return x.cpu().double().square().mean().sqrt().item()  # MPS has no float64
