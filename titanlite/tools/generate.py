"""`titanlite generate RUN_OR_CHECKPOINT --prompt TEXT`: sample from a run's newest checkpoint, or from a
given one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import first_fault
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.resume import find_checkpoint
from titanlite.checkpoint.state import model_tensors
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.generate import generate
from titanlite.job import load_job
from titanlite.log import set_up_logging
from titanlite.runtime import pick_device


def main(argv: Sequence[str]) -> int:
    """Print the prompt and its continuation."""
    parser = argparse.ArgumentParser(prog="titanlite generate", description=__doc__)
    parser.add_argument("path", type=Path, help="a run folder, its checkpoint folder, or one step-N folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens after the prompt, at most")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--allow-imports", action="store_true", help="run the modules that the job imports")
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1 or not options.temperature >= 0:
        raise ConfigError("--max-new-tokens must be at least 1 and --temperature at least 0")
    set_up_logging(rank=0, verbose=False)
    path = find_checkpoint(options.path)
    imports = toml.read(path / "job.toml", [])[0].get("job", {}).get("imports", [])
    if imports and not options.allow_imports:
        raise ConfigError(
            f"{path}/job.toml imports {', '.join(imports)}, which would run that code; if you trust it, add "
            "--allow-imports"
        )
    if reason := first_fault(path, commit.digests(commit.read_manifest(path))):
        raise CheckpointError(f"{path} is damaged: {reason}")
    job = load_job(path / "job.toml", world_size=None)
    codec = job.tokenizer.build()
    device = pick_device()
    with torch.device("meta"):
        net = job.model.build()
    net.to_empty(device=device)
    load_tensors(path, {"model": model_tensors(net)})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    net.to(dtype).requires_grad_(False)
    text = generate(
        net, codec, options.prompt, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
        seed=options.seed, device=device,
    )  # fmt: skip
    print(text)
    return 0
