"""The modules that the server of forked ranks imports before the first fork, so that ranks do not have to."""

from __future__ import annotations

import gc
import importlib

from titanlite.runtime.environment import importing_for_copies

with importing_for_copies():
    for module in (
        "titanlite.cli",
        "titanlite.train",
        "numpy.ma",  # these are imported late by a run
        "torch._functorch.aot_autograd",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.distributed.pipelining",
        "torch.testing",
        "pytest",
        "hypothesis",
    ):
        importlib.import_module(module)
gc.collect()
gc.freeze()  # else each rank's garbage collector looks through, and so copies, all that was imported
