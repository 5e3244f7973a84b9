"""`titanlite config CONFIG.toml [--section.key=value ...]`: check a job, but for what depends on the number
of ranks, and print it resolved, as TOML.

`titanlite config --reference` prints every key with its type, default and meaning as Markdown:
docs/config.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanlite.commands import ALLOW_IMPORTS, take_flag, take_numbers
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.overrides import split_arguments
from titanlite.job import Job, load_job
from titanlite.models.base import Decoder
from titanlite.parallel.float8 import divide_layers
from titanlite.parallel.recompute import apply_recompute
from titanlite.startup import annotated, resolved


def main(argv: Sequence[str]) -> int:
    """Print the resolved job."""
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    path, overrides = split_arguments(argv)
    own, overrides = take_numbers(overrides, ["ranks"])
    job = load_job(path, overrides, None, allow)
    try:
        job.check(own.get("ranks", job.parallelism.fewest_ranks))
        net = build_on_meta(job)
    except ConfigError as e:
        raise toml.read(path, overrides)[1].located(e) from None
    size = sum(p.numel() for p in net.parameters())
    print(annotated(job, resolved(job, size, None)), end="")
    return 0


def build_on_meta(job: Job) -> Decoder:
    """The model without memory. Raises ConfigError for what names parts that it does not have."""
    with torch.device("meta"):
        net = job.model.build()
    if job.float8.enable:
        divide_layers(net, job.float8, job.parallelism.tensor_parallel_degree)
    apply_recompute(net, job.activation_checkpoint)
    return net
