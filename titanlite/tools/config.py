"""titanlite config CONFIG.toml [--ranks N] [--no-files] [--gpus-per-node 8] [--allow-imports]
    [--section.key=value ...]

Check a job, and print it with all defaults resolved, as TOML.

With --ranks, the job is checked as at the start of a run on N ranks: its files, which are the tokenizer,
data, tasks, initial weights and the run folder, and its layout, by a dry run. The dry run makes the mesh, the
pipeline stages and the shards of the ranks that differ in this process, without weights, and prints their
parameters; it warns if tensor parallel spans nodes of --gpus-per-node ranks (default: 8). Nothing is written
or tokenised, and no training starts. --no-files leaves the files out, for a machine that does not have them.

Without --ranks, all rules are checked for the fewest ranks that the degrees of [parallelism] allow, and
neither files nor layout. `titanlite config --reference` prints every key with its type, default and meaning
as Markdown: docs/config.md. `titanlite config CONFIG.toml --reference --allow-imports` adds the keys of the
components that the file imports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from titanlite.checkpoint.start import decide
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_arguments
from titanlite.job import Job, load_job
from titanlite.models.base import Decoder
from titanlite.options import take_flag, take_numbers
from titanlite.parallel import dry_run
from titanlite.parallel.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallel.expert_loads import check_routers
from titanlite.parallel.float8 import check_experts, split_layers
from titanlite.parallel.pipeline_parallel import check_auxiliary_losses
from titanlite.ranks import Ranks
from titanlite.runtime.environment import set_library_defaults
from titanlite.runtime.process import pick_device
from titanlite.runtime.training import BatchLayout, choose_param_dtype
from titanlite.start import (
    NotReady,
    assemble,
    check_device,
    check_resumed,
    open_tokenizer,
)
from titanlite.start_log import about_steps, job_toml_text, summary
from titanlite.tools.verbs import CONFIG_NUMBERS, NO_FILES

GPUS_PER_NODE = 8  # without --gpus-per-node


def main(argv: Sequence[str]) -> int:
    """Check the job and print it resolved."""
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    no_files, argv = take_flag(argv, NO_FILES)
    path, overrides = split_arguments(argv)
    own, overrides = take_numbers(overrides, CONFIG_NUMBERS, least=1)
    if "ranks" not in own and (no_files or own):
        given = NO_FILES if no_files else "--gpus-per-node"
        raise ConfigError(
            f"command line, {given}: needs --ranks, without which neither files nor layout are checked"
        )
    job = load_job(path, overrides, None, allow)
    ranks, num_ids = own.get("ranks", job.parallelism.fewest_ranks), None
    about = [f"checked: the rules for {ranks} rank(s), no files; --ranks=N checks both for N ranks"]
    try:
        job.check(ranks)
        resolved = job.resolved(ranks)
        if "ranks" in own:
            about = [f"checked with --ranks={ranks}: rules{'' if no_files else ', files'} and layout"]
        if "ranks" in own and not no_files:
            resolved, num_ids, unchecked = check_inputs(job, ranks)
            about += [f"not checked: {subject}" for subject in unchecked]
        net = build_on_meta(job)
        if "ranks" in own:
            about += check_layout(job, ranks, own.get("gpus_per_node", GPUS_PER_NODE))
    except ConfigError as e:
        raise toml.read(path, overrides)[1].located(e) from None
    if resolved.amounts():
        about.append("not checked: the rules on numbers of steps")
    lines = [*summary(job, net, num_ids), *about_steps(job, resolved), *about]
    print(job_toml_text(resolved, lines), end="")
    return 0


def build_on_meta(job: Job) -> Decoder:
    """Build the model on the meta device. Raises ConfigError for a key with a pattern that matches none of
    its modules or parameters."""
    net = job.build_on_meta()
    job.optimizer.check(net, job.parallelism.tensor_parallel_degree)
    if job.float8.enable:
        split_layers(net, job.float8, job.parallelism.tensor_parallel_degree)
        check_experts(net, job.float8)
    check_routers(net, job.moe)
    check_auxiliary_losses(net, job.parallelism.pipeline_parallel_degree)
    apply_activation_checkpoint(net, job.activation_checkpoint)
    return net


def check_layout(job: Job, ranks: int, gpus_per_node: int) -> list[str]:
    """Shard the model as a run on `ranks` ranks does. Returns lines on the layout, on the ranks that differ,
    and warnings, which are also printed. Raises ConfigError."""
    degrees = job.parallelism.degrees(ranks)
    settings = job.parallel_settings(torch.float32)
    simulated = dry_run.dry_run(job.build_on_meta, job.loss, settings, ranks)
    warnings = dry_run.warnings(simulated, degrees, gpus_per_node)
    for text in warnings:
        print(f"titanlite: warning: {text}", file=sys.stderr)
    layout = job.parallelism.describe(degrees, job.model.num_experts)
    lines = [f"layout of {ranks} rank(s): {layout}", *(rank.describe() for rank in simulated)]
    return lines + [f"warning: {text}" for text in warnings]


def check_inputs(job: Job, ranks: int) -> tuple[Job, int, list[str]]:
    """Check files and device as a run on `ranks` ranks does before it trains. Returns the job with its
    amounts of training resolved, the tokenizer's vocabulary size, and descriptions of what cannot be checked
    here. Raises ConfigError or CheckpointError."""
    job.check_folders()
    unchecked = check_this_device(job, ranks)
    start = decide(job.checkpoint, job.folder)
    try:
        job = assemble(job, ranks, Ranks(job.folder, alone=True), start, dry=True).job
    except NotReady:
        unchecked.append("data that is tokenised or packed when a run first starts")
        job = job.resolved(ranks)
        batch = BatchLayout.from_training(job.training, job.parallelism.degrees(ranks).data_parallel)
        check_resumed(job, batch.global_size, start.candidate and start.candidate.train)
    return job, open_tokenizer(job).vocab_size, unchecked


def check_this_device(job: Job, ranks: int) -> list[str]:
    """Check the job on this machine's device. Returns descriptions of what cannot be checked here. On a
    machine without a GPU, where runs on GPUs are often prepared, a feature that the CPU lacks is no error."""
    set_library_defaults()
    job.float8.check_library()
    device = pick_device()
    gpu = device.type == "cuda"
    if not gpu:
        job.profiling.check(torch.device("cuda"), ranks)  # checks the ranks only
    try:
        check_device(job, device, choose_param_dtype(job.training, device), ranks)
    except ConfigError as e:
        if gpu:
            raise
        return [f"the GPU: this machine has none (here a run would end with {e.key}: {e})"]
    return [] if gpu else ["the GPU: this machine has none"]
