"""Start torchtitan's trainer with a configuration of config_registry.py, and with what this version of torch
lacks (compat.py). torchtitan's own options follow; `--help` lists them.

    PYTHONPATH=.:FOLDER python -m torch.distributed.run --standalone --nproc_per_node=1
        -m benchmarks.torchtitan_peer.train --config llama3_1b [--training.local_batch_size 8 ...]

FOLDER: released packages (benchmarks/throughput.py says which). `datasets` and `wandb` are imported by
torchtitan, but never used on random tokens: where they are not installed, empty modules take their place.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

from benchmarks.torchtitan_peer import compat

UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "wandb": (),
}


def replace_unused() -> None:
    """Put empty modules in place of the packages that are imported but never used, where they are missing."""
    missing = [name for name in UNUSED if "." not in name and importlib.util.find_spec(name) is None]
    for name, attributes in UNUSED.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name)
            module.__path__ = []
            for attribute in attributes:
                setattr(module, attribute, None)
            sys.modules[name] = module


def main() -> None:
    """Prepare torch and torchtitan, and train."""
    replace_unused()
    changes = compat.before_import()
    import torch
    import torchtitan.train

    changes += compat.after_import()
    # torchtitan reports an ImportError in the module of the configurations as an unknown module.
    import benchmarks.torchtitan_peer.config_registry  # noqa: F401

    if os.environ.get("RANK", "0") == "0":
        print(f"torchtitan_peer: torch {torch.__version__}: {'; '.join(changes) or 'no changes'}", flush=True)
    sys.argv[1:1] = ["--module", "benchmarks.torchtitan_peer"]
    torchtitan.train.main()


if __name__ == "__main__":
    main()
