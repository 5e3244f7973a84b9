"""The sink trackio: Trackio, in a local database, in a Hugging Face Space or on a Trackio server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.metrics.sinks.base import RunInfo
from titanlite.report.trackers.tracker import Client, Numbers, Tracker, TrackerRun


@dataclass(frozen=True, kw_only=True)
class Trackio(Tracker, name="trackio"):
    """Trackio. Its environment variables, such as TRACKIO_DIR, hold, too."""

    project: str = "titanlite"
    """Project."""
    space_id: str = ""
    """Hugging Face Space, such as "user/space"; empty: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else a local
    database, for `trackio show`."""

    def client(self, run: RunInfo) -> Client:
        import trackio  # noqa: F401 -- an ImportError is the user's to see

        return TrackioClient(self.project, self.space_id)


class TrackioClient(Client):
    """trackio identifies a run by its name, so the name ends with the beginning of the id, and with a
    branch's number."""

    def __init__(self, project: str, space_id: str):
        self._project, self._space_id = project, space_id
        self._run: Any = None
        self._is_local = True

    def begin(self, run: TrackerRun) -> str:
        import trackio

        self._run = trackio.init(
            self._project,
            name=f"{run.name}-{run.id[:8]}{run.id[32:]}",
            space_id=self._space_id or None,
            config=run.config,
            resume="allow",
            embed=False,
        )
        space, server = trackio.utils.resolve_space_id_and_server_url(self._space_id or None, None)
        self._is_local = not (space or server)
        return f"{space or server or 'local'} {self._project}"

    def known_steps(self, sent: set[int]) -> set[int]:
        """For a local database, the steps in it: a killed process loses the last half second. A server's
        client keeps a buffer on disk."""
        if not self._is_local:
            return sent
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs(self._project, self._run.name)
        return {row["step"] for row in rows if "train/loss" in row}

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def sample(self, step: int, index: int, text: str) -> None:
        import trackio

        fence = "```"
        self._run.log({f"samples/{index}": trackio.Markdown(f"{fence}\n{text}\n{fence}")}, step=step)

    def end(self, is_complete: bool) -> None:
        self._run.finish()
