"""The journal of a tracker: which records of a run were sent, so that a resumed run sends none twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from titanlite.metrics.records import append, end_last_line


class Branch(NamedTuple):
    """One course of training in a run folder. A run that goes back to `step` and continues differently begins
    the next branch there. `run_id`: of the run folder. `parent`: tracker id of the branch before it; for the
    first branch of a copied folder, of the branch that was copied."""

    run_id: str
    number: int = 0
    step: int = 0
    parent: str = ""

    @property
    def tracker_id(self) -> str:
        """The id of the branch's run in the tracker."""
        return f"{self.run_id}-b{self.number}" if self.number else self.run_id

    def next_at(self, step: int) -> Branch:
        """The branch that begins when the run goes back to `step`."""
        return Branch(self.run_id, self.number + 1, step, self.tracker_id)


class Journal:
    """A file of JSON lines. A line with `run` begins a run of the tracker; each line after it is the key of a
    record that was sent to that run, with the record's signature."""

    def __init__(self, path: Path):
        self._path = path
        self._sent = dict[tuple[Branch, str], dict[str, str]]()  # by branch and target, the newest last
        path.parent.mkdir(exist_ok=True)
        end_last_line(path)
        self._read(path.read_bytes() if path.exists() else b"")

    def _read(self, content: bytes) -> None:
        sent = dict[str, str]()
        for line in content.split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or cut short by a kill
                continue
            if "run" in entry:
                branch = Branch(entry["run"], entry["branch"], entry["step"], entry["parent"])
                sent = self._add(branch, entry["target"])
            else:
                sent[entry["sent"]] = entry["signature"]

    def _add(self, branch: Branch, target: str) -> dict[str, str]:
        sent = self._sent.pop((branch, target), {})
        self._sent[branch, target] = sent
        return sent

    def newest(self, run_id: str) -> Branch | None:
        """The newest branch of a run, in any tracker; None if it has none."""
        return next((branch for branch, _ in reversed(self._sent) if branch.run_id == run_id), None)

    def sent(self, branch: Branch) -> dict[str, str]:
        """Keys and signatures of the records of a branch, from its newest tracker."""
        return next((sent for (other, _), sent in reversed(self._sent.items()) if other == branch), {})

    def begin(self, branch: Branch, target: str) -> dict[str, str]:
        """Note that the next records go to `branch` in the tracker at `target`. Returns keys and signatures
        of the records that were sent there before."""
        run_id, number, step, parent = branch
        self._append({"run": run_id, "branch": number, "step": step, "parent": parent, "target": target})
        return self._add(branch, target)

    def note(self, key: str, signature: str) -> None:
        """Note that a record was sent."""
        self._append({"sent": key, "signature": signature})

    def _append(self, entry: dict[str, object]) -> None:
        append(self._path, json.dumps(entry).encode() + b"\n")
