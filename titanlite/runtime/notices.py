"""Notices that this node will be taken away, as clouds give them for spot instances: `titanlite launch
--notice`.

The launcher polls the cloud's metadata server, a URL or a file. Once there is a notice, it stops the run as
SIGTERM does: the ranks save and end with exit code 75."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from titanlite.config.component import ConfigError, suggest
from titanlite.log import tell

POLL_S = 5.0  # seconds between two polls, as the clouds advise; the shortest notice is 30 s (Google, Azure)
TIMEOUT_S = 2.0  # seconds that a poll waits for an answer
AWS, GOOGLE = "http://169.254.169.254", "http://metadata.google.internal"
AZURE = AWS  # both clouds serve it at the same link-local address


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The text at a URL, None if there is nothing. Raises OSError. A proxy is not used: metadata servers
    answer only the node itself."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read(1 << 20).decode("utf-8", errors="replace")
            return text
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _aws(server: str = AWS) -> bool:
    """Whether Amazon EC2 has announced that it will stop or terminate this spot instance."""
    token = _get(f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT") or ""
    url = f"{server}/latest/meta-data/spot/instance-action"
    return _get(url, {"X-aws-ec2-metadata-token": token}) is not None


def _google(server: str = GOOGLE) -> bool:
    """Whether Google Compute Engine has announced that it will take this instance."""
    url = f"{server}/computeMetadata/v1/instance/preempted"
    return (_get(url, {"Metadata-Flavor": "Google"}) or "").strip() == "TRUE"


def _azure(server: str = AZURE) -> bool:
    """Whether Azure has announced that it will evict or delete this virtual machine. Its notices name all
    machines of a group, so this machine's name is compared."""
    headers = {"Metadata": "true"}
    name = _get(f"{server}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    events = _get(f"{server}/metadata/scheduledevents?api-version=2020-07-01", headers)
    return any(
        event["EventType"] in ("Preempt", "Terminate") and name in event["Resources"]
        for event in json.loads(events or "{}").get("Events", [])
    )


CLOUDS: dict[str, Callable[[], bool]] = {"aws": _aws, "azure": _azure, "google": _google}


def source_of(notice: str) -> Callable[[], bool]:
    """The function that polls for a notice. `notice`: a name of CLOUDS, the URL of a notice that answers
    with 404 until there is one, or the path of a file that does not exist until then. The function raises
    OSError if there is no answer. Raises ConfigError for another text."""
    if notice in CLOUDS:
        return CLOUDS[notice]
    if notice.startswith(("http://", "https://")):
        return lambda: _get(notice, {}) is not None
    if "/" in notice and "://" not in notice:
        return Path(notice).exists
    raise ConfigError(
        f"--notice={notice} (NOTICE of run_train.sh): expected a cloud, a URL with http or https, or a path "
        f"with a slash{suggest(notice, CLOUDS)}"
    )


@contextmanager
def stop_at_notice(notice: str) -> Iterator[None]:
    """In the body, send this process SIGTERM once a notice is found. `notice`: as in `source_of`, or "" for
    none. Raises ConfigError."""
    if not notice:
        yield
        return
    is_announced, done = source_of(notice), threading.Event()
    thread = threading.Thread(target=_poll, args=(notice, is_announced, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _poll(notice: str, is_announced: Callable[[], bool], done: threading.Event) -> None:
    told = False
    while not done.wait(POLL_S):
        try:
            found = is_announced()
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            if not told:
                tell(f"--notice={notice}: no readable answer ({error}); it is asked for every {POLL_S:.0f} s")
            told = True
            continue
        if found:
            tell(f"--notice={notice}: this node will be taken away; stopping as at SIGTERM")
            os.kill(os.getpid(), signal.SIGTERM)
            return
