"""titanlite checkpoint list DIR                what is there; looks at sizes, not at contents
titanlite checkpoint verify DIR [DIR ...]     hash every file, look for values that are not finite; exit
                                              code 3 if a checkpoint is bad
titanlite checkpoint show DIR [--tensors]     what is in the newest: state, identity, files, tensors

DIR is a run folder, its checkpoint folder, or one step-N folder; a folder with several runs is refused. To
keep a checkpoint for good, put an empty file step-N.keep beside it; to go back to one, train with
--checkpoint.load_step=N.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import first_fault, gib
from titanlite.checkpoint.reader import read_metadata
from titanlite.checkpoint.resume import checkpoints_below, find_checkpoint, small_files
from titanlite.checkpoint.run_identity import flatten
from titanlite.checkpoint.state import TRAIN, read_train
from titanlite.config.component import ConfigError, suggest
from titanlite.interop.dcp import non_finite_in
from titanlite.log import printable

EXIT_BAD = commit.CheckpointError.exit_code


def main(argv: Sequence[str]) -> int:
    """Run an action."""
    action, *rest = argv
    options = [a for a in rest if a.startswith("--")]
    paths = [Path(a) for a in rest if not a.startswith("--")]
    actions = {"list": _list, "verify": _verify, "show": _show}
    if action not in actions:
        raise ConfigError(f"unknown action {action!r}{suggest(action, sorted(actions))}")
    if unknown := [o for o in options if (action, o) != ("show", "--tensors")]:
        raise ConfigError(f"unknown option {unknown[0]!r} of `titanlite checkpoint {action}`")
    if not paths or (action != "verify" and len(paths) > 1):
        raise ConfigError(f"`titanlite checkpoint {action}` takes one directory; see --help")
    return _show(paths, bool(options)) if action == "show" else actions[action](paths)


def _list(paths: list[Path]) -> int:
    found = checkpoints_below(paths[0])
    faults = {path: commit.fault(path, step) for step, path in found}
    newest = next((path for _, path in reversed(found) if not faults[path]), None)  # what a run goes on from
    _say(found[0][1].parent)
    _say(f"{'step':>10}  {'saved at':25}  {'size':>10}  {'ranks':>5}  ")
    for step, path in found:
        notes = ["kept by step-N.keep"] if commit.is_kept(path) else []
        if reason := faults[path]:
            _say(f"{step:>10}  BAD: {reason}")
            continue
        notes += ["newest"] if path == newest else []
        m = commit.read_manifest(path)
        size = sum(digest.size for digest in commit.digests(m).values())
        _say(f"{step:>10}  {m['saved_at']:25}  {gib(size):>10}  {m['ranks']:>5}  {', '.join(notes)}".rstrip())
    for path in sorted(found[0][1].parent.iterdir()):
        if path.name.startswith(".partial-"):
            _say(f"{path.name}: being written, or left by a killed run; the next start removes it")
        elif path.name.startswith("quarantined-"):
            _say(
                f"{path.name}: quarantined at a start, because it was damaged; delete it when you have looked"
            )
        elif path.name.startswith("archived-"):
            steps = ", ".join(str(step) for step, _ in commit.committed(path)) or "that were damaged"
            _say(f"{path.name}: steps {steps}, archived when the run went back with load_step, or restarted")
    return 0


def _verify(paths: list[Path]) -> int:
    bad = 0
    for step, path in [item for root in paths for item in checkpoints_below(root)]:
        reason = commit.fault(path, step)
        files = {} if reason else commit.digests(commit.read_manifest(path))
        reason = reason or first_fault(path, files)
        if reason is None and (names := non_finite_in(path)):
            reason = f"not finite: {', '.join(names)}"
        size = gib(sum(digest.size for digest in files.values()))
        _say(f"{path}: {f'BAD: {reason}' if reason else f'good, {len(files)} files, {size}'}")
        bad += reason is not None
    return EXIT_BAD if bad else 0


def _show(paths: list[Path], list_tensors: bool = False) -> int:
    path = find_checkpoint(paths[0])
    manifest = commit.read_manifest(path)
    if reason := first_fault(path, small_files(path)):
        raise commit.CheckpointError(f"{path} is damaged: {reason}")
    try:
        train = read_train(path)
    except ValueError as e:
        raise commit.CheckpointError(f"{path} is damaged: its {TRAIN} cannot be trusted: {e}") from None
    identity = flatten(train.pop("identity"))
    saved = read_metadata(path).state_dict_metadata
    tensors = {name: t for name, t in saved.items() if isinstance(t, TensorStorageMetadata)}
    _say(path)
    for key, value in {**train, **{k: v for k, v in manifest.items() if k not in ("files", "step")}}.items():
        if value is not None:
            _say(f"  {key:20} {value:,}" if type(value) is int else f"  {key:20} {value}")
    for title, values in (("identity", identity), ("files", commit.digests(manifest))):
        _say(f"{title}:")
        for key, value in values.items():
            _say(
                f"  {key:40} {value if title == 'identity' else f'{value.size:>15,}  sha256 {value.sha256}'}"
            )
    for part in sorted({name.partition(".")[0] for name in tensors}):
        inside = {name: t for name, t in tensors.items() if name.startswith(f"{part}.")}
        total = sum(t.size.numel() for t in inside.values())
        _say(f"{part}: {len(inside)} tensors, {total:,} elements")
        for name, t in inside.items() if list_tensors else ():
            dtype = str(t.properties.dtype).removeprefix("torch.")
            _say(f"  {name:60} {dtype:10} {tuple(t.size)}")
    return 0


def _say(line: object) -> None:
    """Print a line in which something recorded may stand."""
    print(printable(line), flush=True)
