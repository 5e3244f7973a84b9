"""Start torchtitan's trainer with a configuration of config_registry.py, and with replacements for functions
that this version of torch lacks (compat.py). torchtitan's own options follow; `--help` lists them.

    PYTHONPATH=.:FOLDER python -m torch.distributed.run --standalone --nproc_per_node=1
        -m benchmarks.torchtitan_peer.train --config llama3_1b [--training.local_batch_size 8 ...]

FOLDER: released packages (benchmarks/throughput.py says which). torchtitan imports `datasets`, but never uses
it on random tokens: where it is not installed, an empty module takes its place.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

from benchmarks.torchtitan_peer import compat

UNUSED = {"datasets": ("Dataset", "load_dataset"), "datasets.distributed": ("split_dataset_by_node",)}


def replace_datasets() -> None:
    """Put empty modules in place of `datasets` if it is not installed."""
    if importlib.util.find_spec("datasets") is not None:
        return
    for name, attributes in UNUSED.items():
        module = ModuleType(name)
        module.__path__ = []
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules[name] = module


def main() -> None:
    """Prepare torch and torchtitan, and train."""
    replace_datasets()
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
