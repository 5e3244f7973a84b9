"""Real text that needs no download: the source and documentation files of the standard library and of all
installed packages. Used by optimizer_curves.py; alone it makes the dataset and prints what is in it.

    python benchmarks/package_text.py [--folder outputs/package_text] [--megabytes 250]

Each file of at most 256 KiB is a document. Equal files count once. One document in a hundred, chosen by the
hash of its text, is for validation: all runs on a machine validate on the same text, and train on none of it.
Copies with changes, such as generated code and licences, are not removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Collection, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import installed  # noqa: E402
from titanlite.data.shards import TokenShards  # noqa: E402

FOLDER, MEGABYTES = Path("outputs/package_text"), 250
TOKENIZER = "assets/tokenizer/stdlib.tiktoken"
SUFFIXES = {".py", ".pyi", ".rst", ".txt", ".md"}
MIN_BYTES, MAX_BYTES = 200, 256 << 10
VALIDATION_SHARE = 100  # one document in so many
LEFT_OUT = {"titanlite", "__pycache__"}  # titanlite's own source changes too often


class Document(NamedTuple):
    """A file's text, with the hash that orders the documents and the package that the file belongs to."""

    digest: str
    package: str
    text: str


def main() -> None:
    """Make the dataset and print what is in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    options = parser.parse_args()
    print(json.dumps(package_text(options.folder, options.megabytes), indent=1))


def package_text(folder: Path, megabytes: int) -> dict[str, Any]:
    """Make the datasets `train` and `validation` in `folder`, from at most `megabytes` of text, unless they
    are there. Returns the numbers of files, bytes and tokens, a hash of the text, the seconds it took, and
    the packages with their versions and bytes."""
    summary = folder / f"summary_{megabytes}.json"
    if not summary.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        summary.write_text(json.dumps(_make(folder, megabytes)))
    about: dict[str, Any] = json.loads(summary.read_text())
    return about


def _make(folder: Path, megabytes: int) -> dict[str, Any]:
    began = time.perf_counter()
    packages, total, digests = Counter[str](), Counter[str](), hashlib.sha256()
    files = {
        split: (folder / f"{split}.jsonl").open("w", encoding="utf-8") for split in ("train", "validation")
    }
    for document in _documents():
        num_bytes = len(document.text.encode())
        if total["bytes"] + num_bytes > megabytes * 10**6:
            break
        split = "validation" if int(document.digest, 16) % VALIDATION_SHARE == 0 else "train"
        files[split].write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
        total.update({"files": 1, "bytes": num_bytes})
        packages[document.package] += num_bytes
        digests.update(document.digest.encode())
    for split, file in files.items():
        file.close()
        _tokenise(Path(file.name), folder / split)
    return {
        **total,
        **{f"{split}_tokens": TokenShards(folder / split).num_tokens for split in files},
        "sha256": digests.hexdigest(),
        "seconds": time.perf_counter() - began,
        "packages": package_versions(packages),
    }


def _documents() -> Iterator[Document]:
    """The documents, without repetitions, in the order of their hashes: any first part of them is a sample of
    all packages."""
    documents: dict[str, Document] = {}
    for package, path in package_files(SUFFIXES):
        text = file_text(path)
        if text is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()
            documents.setdefault(digest, Document(digest, package, text))
    yield from (documents[digest] for digest in sorted(documents))


def package_files(suffixes: Collection[str], names: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """The package and the path of each file with one of the suffixes or names, in the standard library and in
    all installed packages."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    installed = sorted({Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")})
    for root in (standard, *installed):
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root).parts
            if (path.suffix not in suffixes and path.name not in names) or LEFT_OUT & set(inside):
                continue
            if root == standard and {"site-packages", "dist-packages"} & set(inside):
                continue
            yield "standard library" if root == standard else re.split(r"[-.]", inside[0])[0], path


def file_text(path: Path) -> str | None:
    """The text of a file of the right size in UTF-8, or None."""
    try:
        if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
            return None
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _tokenise(file: Path, output: Path) -> None:
    command = [sys.executable, "-m", "titanlite.cli", "prepare", str(file), f"--output={output}"]
    command += [f"--tokenizer.path={TOKENIZER}", "--tokenizer.num_special_tokens=2"]
    subprocess.run(command, check=True, cwd=ROOT)
    file.unlink()


def package_versions(packages: Counter[str]) -> list[dict[str, Any]]:
    """The packages with at least a megabyte of text, the largest first, and the sum of all others."""
    distributions, result, others = packages_distributions(), list[dict[str, Any]](), 0
    for name, num_bytes in packages.most_common():
        if num_bytes < 10**6:
            others += num_bytes
            continue
        is_python = name == "standard library"
        number = platform.python_version() if is_python else installed(distributions.get(name, [name])[0])
        result.append({"package": name, "version": number, "bytes": num_bytes})
    return [*result, {"package": "others", "version": "", "bytes": others}]


if __name__ == "__main__":
    main()
