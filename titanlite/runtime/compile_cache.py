"""Where torch's compiler keeps the code that it generates, so that a later start does not generate it again:
a folder of the user's, because the code is executed when it is read. It is never in a run folder, which
people copy and share."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from functools import cache
from pathlib import Path, PurePath

import torch

import titanlite
from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.runtime.environment import compile_cache_of_user, set_compile_cache, user_cache
from titanlite.runtime.process import device_name

# Modules with custom operators or passes over graphs. Compiled code calls operators by their names, with the
# arguments that they had when it was compiled. torch's keys of the code depend neither on the definitions
# of operators nor on passes.
DEFINES = re.compile(rb"custom_op|CustomGraphPass")


def use_compile_cache(cache_dir: str, compiles: bool, device: torch.device, run_folder: PurePath) -> None:
    """Let torch's compiler keep its code in `cache_dir`, by default `titanlite/compile` in the user's cache
    folder, and there in a folder for these versions of torch and titanlite and this device. If the user has
    set TORCHINDUCTOR_CACHE_DIR, it stays, unless `cache_dir` is given. `compiles`: whether the model is
    compiled; otherwise a run on a CPU compiles nothing, and neither makes nor checks the default folder.

    Raises ConfigError if others own `cache_dir` or may write to it, or if it is in `run_folder`. If the
    default folder cannot be made, or is not the user's alone, compiled code stays where torch keeps it, and a
    warning says so."""
    _tag_with_definitions()
    if not cache_dir and (compile_cache_of_user() or not (compiles or device.type == "cuda")):
        return
    # Code for a CPU uses the instructions of this one, and a home folder may be on several machines.
    kind = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_name(device)
    name = f"torch-{torch.__version__} titanlite-{titanlite.__version__} {kind}"
    folder = Path(cache_dir) if cache_dir else user_cache() / "titanlite" / "compile"
    try:
        folder = folder.expanduser()
        if cache_dir and folder.resolve().is_relative_to(Path(run_folder).resolve()):
            raise ConfigError(
                f"{folder} is in the run folder {run_folder}: who copies the run would execute the code in it"
            )
        own = folder / re.sub(r"[^\w.+-]+", "_", name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        own.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError, ConfigError) as e:  # RuntimeError: `~` is the home folder of nobody
        why = str(e)
        if not isinstance(e, ConfigError):
            why = f"cannot use the folder {folder}: {e.strerror if isinstance(e, OSError) else e}"
        if cache_dir:
            raise ConfigError(why, "compile.cache_dir") from None
        logger.warning(f"compiled code stays in torch's own folder, unless you set compile.cache_dir: {why}")
        return
    set_compile_cache(str(own.absolute()))


def _tag_with_definitions() -> None:
    """Let torch's compiler read only code that was compiled with these operators and passes."""
    config, digest = torch.compiler.config, _digest_of_definitions(Path(titanlite.__file__).parent)
    if not config.cache_key_tag.endswith(digest):  # the user may have set one
        config.cache_key_tag += f" {digest}"


@cache
def _digest_of_definitions(package: Path) -> str:
    """SHA-256 of the modules that match DEFINES. Read once per process, whose modules stay as they are."""
    files = sorted(package.rglob("*.py")) or sorted(package.rglob("*.pyc"))  # an installation without sources
    sources = [source for file in files if DEFINES.search(source := file.read_bytes())]
    return hashlib.sha256(b"".join(sources)).hexdigest()


def _check_owner(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid():
        why = "belongs to another user"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written to by other users; `chmod 700 {folder}` takes their right away"
    else:
        return
    raise ConfigError(f"{folder} {why}. The code in it is executed: name a folder of your own")
