"""What a rank imports before it trains. The launcher's parent of ranks imports this module once, so that the
ranks that it forks do not have to (titanlite/runtime/forked_ranks.py)."""

from __future__ import annotations

import gc
import importlib

from titanlite.runtime.environment import asking_nvml
from titanlite.runtime.parent import die_with_launcher

MODULES = (
    "titanlite.train",
    "numpy.ma",  # a run imports these late
    "torch._functorch.aot_autograd",
    "torch._dynamo",
    "torch.distributed.pipelining",
)

die_with_launcher()
with asking_nvml():
    for name in MODULES:
        importlib.import_module(name)
gc.collect()
gc.freeze()  # else the garbage collector of each rank looks through, and so copies, all that was imported
