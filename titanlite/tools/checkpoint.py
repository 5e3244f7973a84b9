"""titanlite checkpoint list DIR                list checkpoints; checks file sizes, not contents
titanlite checkpoint verify DIR [DIR ...]     hash every file and search for values that are not finite; exit
                                              code 3 if a checkpoint is bad
titanlite checkpoint show DIR [--tensors]     print the newest checkpoint's state, identity, files and tensors
titanlite checkpoint digest DIR [--tensors]   print the digests of the newest checkpoint's weights and state:
                                              equal for equal bits, on any layout
titanlite checkpoint average DIR -o NEW --last=N [--weights=uniform|linear|sqrt]
                                              average the weights of the newest N checkpoints of a run

DIR is a run folder, its checkpoint folder, or one step-N folder; a folder with several runs is an error. To
keep a checkpoint for good, put an empty file step-N.keep beside it. To go back to step N, train with
--checkpoint.load_step=N.

NEW, made by `average`, is a checkpoint without optimizer state: `titanlite export`, `generate` and
`checkpoint` read it, and a new run starts from it with --checkpoint.initial_load_path=NEW. Buffers are those
of the newest checkpoint.
  --steps=A,B,...     average the checkpoints of these steps instead of the newest
  --weights=uniform   equal weights (the default)
           =linear    proportional to 1, 2, ..., N, from the oldest to the newest
           =sqrt      imitates a 1 - sqrt decay of the learning rate; docs/optimizers.md has the formula
  --allow-decayed     average although the learning rate changes by more than a tenth among the checkpoints
  --allow-imports     run the modules that the job imports
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.find import checkpoints_below, find_checkpoint
from titanlite.checkpoint.reader import read_metadata
from titanlite.checkpoint.state import AVERAGED_FROM, TRAIN
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.fetch import verified_copy
from titanlite.interop.dcp import non_finite_in
from titanlite.log import set_up_logging
from titanlite.object_store import location
from titanlite.storage import storage_of

EXIT_BAD = commit.CheckpointError.exit_code
_print = partial(print, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the action `list`, `verify`, `show`, `digest` or `average`."""
    action, *rest = argv
    if action == "average":
        from titanlite.tools import average  # which needs every component; the other actions need none

        return average.main(rest)
    options = [word for word in rest if word.startswith("--")]
    paths = [location(word) for word in rest if not word.startswith("--")]
    actions: dict[str, Callable[..., int]] = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "digest": _digest,
    }
    if action not in actions:
        raise ConfigError(f"unknown action {action!r}{suggest(action, [*actions, 'average'])}")
    if unknown := [o for o in options if action not in ("show", "digest") or o != "--tensors"]:
        raise ConfigError(f"unknown option {unknown[0]!r} of `titanlite checkpoint {action}`")
    if not paths or (action != "verify" and len(paths) > 1):
        raise ConfigError(f"`titanlite checkpoint {action}` takes one directory; see --help")
    return actions[action](paths, *([True] if options else []))


def _list(paths: list[PurePath]) -> int:
    checkpoints = checkpoints_below(paths[0])
    folder, found = checkpoints[0][1].parent, dict[PurePath, commit.Manifest | commit.Damaged]()
    for step, path in checkpoints:
        try:
            found[path] = commit.check(path, step)
        except commit.Damaged as e:
            found[path] = e
    newest = next((path for path, m in reversed(found.items()) if isinstance(m, dict)), None)
    _print(folder)
    _print(f"{'step':>10}  {'saved at':25}  {'size':>10}  {'ranks':>5}  ")
    for step, path in checkpoints:
        m = found[path]
        if isinstance(m, commit.Damaged):
            _print(f"{step:>10}  BAD: {m}")
            continue
        notes = ["kept by step-N.keep"] if commit.is_kept(path) else []
        notes += ["newest"] if path == newest else []
        size = gib(commit.total_size(m))
        line = f"{step:>10}  {m['saved_at']:25}  {size:>10}  {m['ranks']:>5}  {', '.join(notes)}"
        _print(line.rstrip())
    disk = storage_of(folder)
    for path in sorted({*disk.list(folder), *disk.list(folder, ".partial-*")}):
        if path.name.startswith(".partial-"):
            _print(f"{path.name}: being written, or left by a killed run; the next start removes it")
        elif path.name.startswith("quarantined-"):
            _print(f"{path.name}: damaged and quarantined by a start of the run; delete it after inspection")
        elif path.name.startswith("archived-"):
            steps = ", ".join(str(step) for step, _ in commit.list_committed(path)) or "that were damaged"
            _print(f"{path.name}: steps {steps}, archived when the run went back or restarted")
    return 0


def _verify(paths: list[PurePath]) -> int:
    bad = 0
    for step, path in [item for root in paths for item in checkpoints_below(root)]:
        try:
            manifest = commit.check(path, step)
            with verified_copy(path, manifest) as copy:
                names = non_finite_in(copy)
            reason = f"not finite: {', '.join(names)}" if names else ""
        except commit.Damaged as e:
            reason = str(e)
        if reason:
            _print(f"{path}: BAD: {reason}")
        else:
            _print(f"{path}: good, {len(manifest['files'])} files, {gib(commit.total_size(manifest))}")
        bad += bool(reason)
    return EXIT_BAD if bad else 0


def _digest(paths: list[PurePath], list_tensors: bool = False) -> int:
    set_up_logging(rank=0, verbose=False)  # which leaves out torch's warning on reading without ranks
    path = find_checkpoint(paths[0])
    digests, recorded = digests_of_checkpoint(path), commit.read_manifest(path).get("digest", {})
    for name, digest in digests.items() if list_tensors else ():
        _print(f"{digest}  {name}")
    for name, digest in combine(digests).items():
        if recorded.get(name, digest) != digest:
            raise commit.CheckpointError(f"{path}: its manifest has another digest of its {name}")
        _print(f"{digest}  {name}")
    return 0


def _show(paths: list[PurePath], list_tensors: bool = False) -> int:
    path = find_checkpoint(paths[0])
    manifest = commit.read_manifest(path)
    try:
        train = json.loads(commit.read_file(path, TRAIN, manifest))
        saved = read_metadata(path, manifest).state_dict_metadata
    except commit.Damaged as e:
        raise commit.damaged(path, e) from None
    identity, averaged_from = toml.flatten(train.pop("identity")), train.pop(AVERAGED_FROM, {})
    tensors: dict[str, Any] = {name: t for name, t in saved.items() if hasattr(t, "size")}
    _print(path)
    for key, value in {
        **train,
        **{k: v for k, v in manifest.items() if k not in ("files", "step", "sha256")},
    }.items():
        if value is not None:
            _print(f"  {key:22} {value:,}" if type(value) is int else f"  {key:22} {value}")
    for key, value in averaged_from.items():
        values = value if isinstance(value, list) else [value]
        texts = [f"{number:.4f}" if isinstance(number, float) else str(number) for number in values]
        _print(f"  {f'{AVERAGED_FROM}.{key}':22} {', '.join(texts)}")
    _print("identity:")
    for key, value in identity.items():
        _print(f"  {key:40} {value}")
    _print("files:")
    for name, digest in commit.digests(manifest).items():
        _print(f"  {name:40} {digest.size:>15,}  sha256 {digest.sha256}")
    for group in sorted({name.partition(".")[0] for name in tensors}):  # model, optimizer, ...
        inside = {name: t for name, t in tensors.items() if name.startswith(f"{group}.")}
        total = sum(t.size.numel() for t in inside.values())
        _print(f"{group}: {len(inside)} tensors, {total:,} elements")
        for name, t in inside.items() if list_tensors else ():
            dtype = str(t.properties.dtype).removeprefix("torch.")
            _print(f"  {name:60} {dtype:10} {tuple(t.size)}")
    return 0
