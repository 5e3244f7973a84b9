"""Start OLMo-core's trainer with a configuration of configs.py. Options of OLMo-core follow.

    PYTHONPATH=.:FOLDER python -m torch.distributed.run --standalone --nproc_per_node=1
        -m benchmarks.olmo_core_peer.train --config llama3_1b --dump_folder NEW
        [--training.local_batch_size 8] [--train_module.dp_config.prefetch_factor=1 ...]

FOLDER: released packages (benchmarks/throughput.py says which). The options that benchmarks/throughput.py
sets have torchtitan's names, so that both programs can be started by the same lines. The report of a step has
torchtitan's form, too: tokens/s are over the steps since the last report, measured after a device
synchronisation; memory is the peak reserved since the last report.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.olmo_core_peer import PARAMETERS, compat

# Not in main(): the processes that load batches import this module, too, before they import OLMo-core.
CHANGES = compat.before_import()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--dump_folder", type=Path, required=True, help="for the tokens and their index")
    parser.add_argument("--training.steps", dest="steps", type=int, default=30)
    parser.add_argument("--training.local_batch_size", dest="batch", type=int, help="sequences")
    parser.add_argument("--training.seq_len", dest="seq_len", type=int)
    parser.add_argument("--metrics.log_freq", dest="interval", type=int, default=5)
    parser.add_argument(
        "--cudnn_attention", action="store_true", help="let F.scaled_dot_product_attention take cuDNN only"
    )
    train(*parser.parse_known_args())


def train(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train as the release's src/examples/llm/train.py does."""
    import torch
    from olmo_core.distributed.utils import get_rank, get_world_size
    from olmo_core.train import prepare_training_environment, teardown_training_environment
    from olmo_core.utils import seed_all

    from benchmarks.olmo_core_peer.configs import CONFIGS, experiment

    if options.config not in CONFIGS:
        raise SystemExit(f"unknown configuration {options.config}: {', '.join(CONFIGS)}")
    if options.cudnn_attention:
        for other in ("flash", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{other}_sdp")(False)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    prepare_training_environment(backend=backend, shared_filesystem=True)
    work = CONFIGS[options.config]()
    work.batch, work.seq_len = options.batch or work.batch, options.seq_len or work.seq_len
    folder = options.dump_folder.resolve()
    ranks, steps = get_world_size(), options.steps
    config = experiment(work, ranks=ranks, steps=steps, folder=folder).merge(overrides)
    seed_all(0)
    model = config.model.build(init_device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    changed = any(override.lstrip("-").startswith("model.") for override in overrides)
    ours = PARAMETERS.get(options.config.removesuffix("_float8"), parameters)
    if parameters != ours and not changed:
        raise SystemExit(f"{options.config} has {parameters:,} parameters, titanlite's model {ours:,}")
    if get_rank() == 0:
        about = f"torch {torch.__version__}, {parameters:,} parameters"
        print(f"olmo_core_peer: {about}: {'; '.join(CHANGES) or 'no changes'}", flush=True)
        write_tokens(folder / "tokens.npy", steps * ranks * work.batch * work.seq_len, config)
    torch.distributed.barrier()
    train_module = config.train_module.build(model)
    loader = config.data_loader.build(config.dataset.build(), dp_process_group=train_module.dp_process_group)
    trainer = config.trainer.build(train_module, loader)
    trainer.add_callback("report", make_report(options.interval, work.batch * work.seq_len))
    trainer.fit()
    teardown_training_environment()


def write_tokens(path: Path, tokens: int, config: Any) -> None:
    """Write random tokens as OLMo-core's datasets read them: numbers without a header."""
    import numpy

    path.parent.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0).integers(0, config.model.vocab_size, tokens)
    random.astype(config.dataset.get_dtype()).tofile(path)


def make_report(interval: int, tokens: int) -> Any:
    """Return the callback that prints a line for step 1 and for every `interval`-th step. `tokens`: the
    number of tokens per step and GPU."""
    import torch
    from olmo_core.train.callbacks import Callback
    from olmo_core.utils import cuda_sync_debug_mode

    cuda = torch.cuda.is_available()

    @dataclass
    class Report(Callback):
        began: float = 0.0
        reported: int = 0

        def pre_step(self, batch: dict[str, Any]) -> None:
            if self.step == 1:
                self.began = time.perf_counter()

        def post_step(self) -> None:
            if self.step != 1 and self.step % interval:
                return
            loss = self.trainer.get_metric("train/CE loss")
            with cuda_sync_debug_mode("default"):
                if cuda:
                    torch.cuda.synchronize()
                now, gib = time.perf_counter(), torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0
                if os.environ.get("RANK", "0") == "0":
                    print(
                        f"step: {self.step:2}  loss: {float(loss):.5f}  memory: {gib:.2f}GiB  "
                        f"tps: {(self.step - self.reported) * tokens / (now - self.began):,.0f}",
                        flush=True,
                    )
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            self.began, self.reported = time.perf_counter(), self.step

    return Report()


if __name__ == "__main__":
    main()
