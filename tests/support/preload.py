"""The modules that the server of forked ranks imports before the first fork, so that ranks do not have to."""

from __future__ import annotations

import gc
import importlib
import os

before = dict(os.environ)
# A module that asks whether there are GPUs must not ask CUDA: a forked process cannot use CUDA then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
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
os.environ.clear()  # torch's compiler sets the folder of its cache, which would count as the user's choice
os.environ.update(before)
gc.collect()
gc.freeze()  # else each rank's garbage collector looks through, and so copies, all that was imported
