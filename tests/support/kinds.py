"""The types of object that may be in the place of a file, and their names in messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 107 bytes at most
    try:
        server.bind(path.name)
    finally:
        os.chdir(here)


WRONG_KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a named pipe": (make_pipe, "it is a named pipe, not a file"),
    "a directory": (make_folder, "it is a directory, not a file"),
    "a link to itself": (make_loop, "Too many levels of symbolic links"),
    "/dev/zero": (make_endless, "it is a device, not a file"),
    "a socket": (make_socket, "it is a socket, not a file"),
}
