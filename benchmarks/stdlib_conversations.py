"""Conversations about Python's standard library, for docs/finetuning.md.

    python benchmarks/stdlib_conversations.py [--output outputs/conversations]

Questions are put to the docstrings and signatures of the installed library's public functions: what one does,
and which parameters it takes. No text is written by a model. The result depends on the Python version, and on
the modules that its build has. The functions are ordered by the hash of their name, and the first ones are
held out: those at the very beginning are held out for every version that has them."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = """
ast base64 bisect bz2 calendar cmath collections colorsys configparser contextlib copy csv datetime
decimal difflib dis email.utils enum fnmatch fractions ftplib functools getopt glob gzip hashlib heapq
hmac html imaplib importlib.util inspect io ipaddress itertools json keyword linecache locale logging
lzma mailbox math mimetypes numbers operator os os.path pathlib pickle pkgutil platform plistlib
posixpath pprint queue random re secrets shelve shlex shutil socket statistics string struct subprocess
symtable sysconfig tarfile tempfile textwrap threading time timeit token tokenize traceback types typing
unicodedata urllib.parse urllib.request uuid warnings weakref xml.sax.saxutils zipfile zlib
"""
MAX_CHARACTERS = 300  # of an answer


def functions() -> Iterator[tuple[str, Any]]:
    """Yield the public functions of the modules by full name, each once."""
    seen = set[int]()
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name, value in sorted(vars(module).items()):
            is_own = getattr(value, "__module__", "") in (module_name, f"_{module_name}")
            if inspect.isroutine(value) and is_own and not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name}.{name}", value


def conversation(name: str, function: Any) -> list[dict[str, str]] | None:
    """Return one or two questions about a function, with answers; None without a usable docstring."""
    summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    if not 20 <= len(summary) <= MAX_CHARACTERS or "(" in summary.split(" ")[0]:
        return None
    turns = [(f"What does {name} do?", summary)]
    try:
        parameters = [
            p for p in inspect.signature(function).parameters if p not in ("args", "kwargs", "kwds")
        ]
    except (TypeError, ValueError):
        parameters = []
    if parameters:
        turns.append(("Which parameters does it take?", f"It takes {', '.join(parameters)}."))
    return [
        {"role": role, "content": text}
        for question, answer in turns
        for role, text in (("user", question), ("assistant", answer))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/conversations"))
    parser.add_argument("--num-train", type=int, default=200)
    parser.add_argument("--num-held-out", type=int, default=40)
    options = parser.parse_args()
    chats = {name: chat for name, function in functions() if (chat := conversation(name, function))}
    shuffled = sorted(chats, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    num_chats = options.num_train + options.num_held_out
    if len(shuffled) < num_chats:
        sys.exit(f"the standard library gives {len(shuffled)} conversations, fewer than {num_chats}")
    options.output.mkdir(parents=True, exist_ok=True)
    num_held_out = options.num_held_out
    by_file = {"train": shuffled[num_held_out:num_chats], "held_out": shuffled[:num_held_out]}
    for file, names in by_file.items():
        lines = [json.dumps({"messages": chats[name]}, ensure_ascii=False) + "\n" for name in names]
        (options.output / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{options.output / file}.jsonl: {len(lines)} conversations, of {len(shuffled)} in all")


if __name__ == "__main__":
    main()
