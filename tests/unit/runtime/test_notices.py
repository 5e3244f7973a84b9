"""Notices that a node will be taken away: the metadata servers of the clouds as documented, URLs, files."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from titanlite.config.component import ConfigError
from titanlite.runtime import notices


class Metadata(BaseHTTPRequestHandler):
    """Answers as the metadata servers of the clouds do. `answers`: text by path without its query; every
    header of a cloud is required."""

    answers: ClassVar[dict[str, str]] = {}

    def do_PUT(self) -> None:
        self._answer("token" if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        headers = {
            "/latest": "X-aws-ec2-metadata-token",
            "/computeMetadata": "Metadata-Flavor",
            "/metadata": "Metadata",
        }
        needed = next((header for start, header in headers.items() if path.startswith(start + "/")), None)
        if needed and needed not in self.headers:
            self.send_error(401)
        else:
            self._answer(self.answers.get(path))

    def _answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy must not be asked
    monkeypatch.setattr(Metadata, "answers", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def azure_event(kind: str, *machines: str) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": [{"EventType": kind, "Resources": machines}]})


@pytest.mark.parametrize(
    ("cloud", "before", "announced"),
    [
        ("aws", {}, {"/latest/meta-data/spot/instance-action": '{"action": "terminate"}'}),
        (
            "google",
            {"/computeMetadata/v1/instance/preempted": "FALSE"},
            {"/computeMetadata/v1/instance/preempted": "TRUE"},
        ),
        (
            "azure",
            {
                "/metadata/instance/compute/name": "vm-1",
                "/metadata/scheduledevents": azure_event("Preempt", "vm-2"),
            },
            {"/metadata/scheduledevents": azure_event("Preempt", "vm-1")},
        ),
    ],
)
def test_the_notice_of_a_cloud(server: str, cloud: str, before: dict, announced: dict) -> None:
    poll = {"aws": notices._aws, "google": notices._google, "azure": notices._azure}[cloud]
    Metadata.answers |= before
    assert not poll(server)
    Metadata.answers |= announced
    assert poll(server)


def test_azure_restarts_are_no_notice(server: str) -> None:
    Metadata.answers |= {
        "/metadata/instance/compute/name": "vm-1",
        "/metadata/scheduledevents": azure_event("Freeze", "vm-1"),
    }
    assert not notices._azure(server)


def test_urls_and_files(server: str, tmp_path: Path) -> None:
    url, file = notices.source_of(f"{server}/notice"), notices.source_of(f"{tmp_path}/notice")
    assert not url()
    assert not file()
    Metadata.answers["/notice"] = ""
    (tmp_path / "notice").touch()
    assert url()
    assert file()
    with pytest.raises(ConfigError, match=r"--notice=gogle .*expected a cloud, .*did you mean 'google'"):
        notices.source_of("gogle")


def test_a_notice_is_a_sigterm_and_no_answer_is_told_once(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices, "POLL_S", 0.01)
    got = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: got.set())
    try:
        with notices.stop_at_notice("http://127.0.0.1:9/notice"):  # nobody listens
            time.sleep(0.1)
        assert not got.is_set()
        with notices.stop_at_notice(f"{server}/notice"):
            time.sleep(0.1)
            assert not got.is_set()
            Metadata.answers["/notice"] = "soon"
            until = time.monotonic() + 10
            while not got.is_set() and time.monotonic() < until:
                time.sleep(0.01)
            assert got.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
    error = capsys.readouterr().err
    assert error.count("no readable answer") == 1
    assert error.count("this node will be taken away; stopping as at SIGTERM") == 1
