"""The `titanlite` command: runs the verb, and turns its errors into one line and an exit code.

Exit codes: 0 done, 1 crash, 2 configuration or input error, 3 no usable checkpoint, or a checkpoint that
could not be written, 4 the training diverged, 5 out of memory, 6 a GPU computes wrong numbers, 75 stopped by
a signal with nothing lost, 130 interrupted, 128 + n ended by signal n."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import io
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from titanlite import commands
from titanlite.config.component import ConfigError
from titanlite.errors import PEER_ERRORS, TRACEBACK, explain_host_memory, is_out_of_host_memory
from titanlite.files import REFUSALS, is_file_error
from titanlite.log import protect_terminal, tell, write_error
from titanlite.runtime import environment
from titanlite.runtime.signals import Stopped, stop_requests

ROOM = "; make room there (df -h, df -i), or name a folder on another disk"
FILES = "; raise the limit of open files (ulimit -n)"
AGAIN = "; check the disk or the mount (dmesg, df), and start the same command again"
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENAMETOOLONG: "; choose a shorter name",
    errno.EREMOTEIO: "; start the same command again when the store answers",
}
TORCH_MIN, TORCH_BELOW = (2, 11), (2, 14)  # as in pyproject.toml


def main() -> int:
    """Entry point of the console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell; a file of the run must not get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # printing a path that is not UTF-8 must not raise
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    protect_terminal()
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # drop the output; otherwise Python would try again at exit and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # The module is loaded if the verb needed torch. A process with process groups must not finalise Python.
    if process := sys.modules.get("titanlite.runtime.process"):
        process.leave(code)
    return code


def run(argv: Sequence[str]) -> int:
    """Run a verb and report its errors. Returns the exit code."""
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except Stopped as stopped:
        if environment.is_first_local_rank():
            tell(stopped)
        return stopped.exit_code
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE  # as in `titanlite ... | head`
        code = exit_code(error)
        if code == 1 and not hasattr(error, "exit_code") and not is_file_error(error):
            _report_crash(error)
        else:
            if environment.is_first_local_rank():
                tell(_reason(error))
            else:
                # Most such errors occur on all ranks; the launcher then ends this process while it sleeps.
                time.sleep(2)
                tell(f"local rank {environment.place().local_rank}: {_reason(error)}")
        return code


def exit_code(error: Exception) -> int:
    """Return the exit code for an error: its attribute, 5 if the machine's memory is used up, 2 for a refusal
    of the operating system, else 1, at which the launcher may start again: an I/O error or a stale mount may
    be temporary."""
    if is_out_of_host_memory(error):
        return 5
    refused = isinstance(error, OSError) and error.errno in REFUSALS
    return getattr(error, "exit_code", 2 if refused else 1)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or list(argv) == ["help"]:
        print(commands.overview())
        return 0 if argv else 2
    if argv[0] == "help" and len(argv) > 1:
        argv = [argv[1], "--help", *argv[2:]]
    if argv[0] in ("-V", "--version"):
        print(commands.version())
        return 0
    environment.set_thread_defaults()
    name, words = argv[0], argv[1:]
    verb = commands.find(name)
    text = commands.text(name, words)
    if text is not None:
        print(text, end="")
        return 0
    if not words:
        print(verb.help(name), end="", file=sys.stderr)
        return 2
    commands.check(name, words)
    if complaint := unsupported_torch():
        raise ConfigError(complaint)
    trains = name in ("train", "launch")
    if name == "launch" and sys.stderr.isatty():
        tell("starting (importing PyTorch takes some seconds)")
    # From here on a signal requests a stop. train() and the launcher open stop_requests() again.
    with stop_requests(leaves=True) if trains else nullcontext():
        return _main_of(verb.module, words)


def _main_of(module: str, words: Sequence[str]) -> int:
    """Run `main` of a module. Raises RuntimeError if it calls sys.exit: only a user's component does, and
    sys.exit(0) would look like a completed run."""
    try:
        return importlib.import_module(module).main(words)
    except SystemExit as error:
        text = f"a component or an imported module called sys.exit({error.code!r})"
        raise RuntimeError(text) from error


def _reader_is_gone() -> bool:
    """Return whether standard output is a pipe that no process reads."""
    pipe = select.poll()
    pipe.register(1, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _reason(error: Exception) -> str:
    """Return the error in one line; for an error of the file system: file, reason and advice."""
    if is_out_of_host_memory(error):
        return explain_host_memory("", error)
    if isinstance(error, OSError) and is_file_error(error):
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        remedy = REMEDIES.get(error.errno or 0, "" if error.errno in REFUSALS else AGAIN)
        return f"{where}{error.strerror}{remedy}"
    return str(error)


def _report_crash(error: Exception) -> None:
    """Print the traceback. If a rank has lost another rank, it leaves the traceback to the launcher, which
    prints it if no other rank is the cause."""
    text, folder = traceback.format_exc(), environment.notes_folder()
    if folder and PEER_ERRORS.search(f"{type(error).__name__}: {error}"):
        file = os.path.join(folder, f"{TRACEBACK}-{environment.place().rank}")
        with suppress(OSError), open(file, "w", encoding="utf-8", errors="backslashreplace") as f:
            f.write(text)
            return
    write_error(text)


def unsupported_torch() -> str | None:
    """Return the error message for an unsupported version of torch, or None. Does not import torch."""
    needed = f"titanlite needs torch >= {TORCH_MIN[0]}.{TORCH_MIN[1]}, < {TORCH_BELOW[0]}.{TORCH_BELOW[1]}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"{needed}; it is not installed"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and TORCH_MIN <= (int(match[1]), int(match[2])) < TORCH_BELOW:
        return None
    return f"{needed}; found {version}"


if __name__ == "__main__":
    sys.exit(main())
