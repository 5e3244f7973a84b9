"""What libraries are told through the environment, unless the user has told them something else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support.simulated_ranks import connections
from titanlite.runtime import environment


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty environment."""
    values: dict[str, str] = {}
    monkeypatch.setattr(environment, "os", SimpleNamespace(environ=values, path=os.path))
    return values


def test_openmps_threads_soon_sleep(environ: dict[str, str]) -> None:
    environment.set_thread_defaults()
    assert environ == {"GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_users_choice_of_how_threads_wait_stays(environ: dict[str, str], name: str) -> None:
    environ[name] = "1"
    environment.set_thread_defaults()
    assert environ == {name: "1"}


def test_the_flight_recorder_writes_to_the_launchers_folder(environ: dict[str, str]) -> None:
    environ[environment.NOTES] = "/notes"
    environment.set_flight_recorder_defaults()
    assert environ == {
        environment.NOTES: "/notes",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/notes/nccl-",
    }
    assert environment.flight_record_prefix("/notes") == "/notes/nccl-"


def test_a_users_choice_of_the_flight_recorder_stays(environ: dict[str, str]) -> None:
    theirs = {
        environment.NOTES: "/notes",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_FR_DUMP_TEMP_FILE": "/mine_",
    }
    environ.update(theirs)
    environment.set_flight_recorder_defaults()
    assert environ == theirs
    assert environment.flight_record_prefix("/notes") == "/mine_"


def test_the_command_sets_it_before_torch_is_imported() -> None:
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ['GOMP_SPINCOUNT'], flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from titanlite import cli\n"
        "cli.run(['generate', 'nowhere'])\n"
    )
    own = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    run = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("1000\n", "")


@pytest.mark.parametrize("theirs", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_ranks_of_one_node_stay_on_the_loopback_interface(environ: dict[str, str], theirs: str) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environ[theirs] = "eth7"  # the user's own choice stays
    environment.stay_on_this_node()
    assert environ == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, theirs: "eth7"}


def test_many_ranks_connect_on_demand(environ: dict[str, str]) -> None:
    environment.connect_on_demand(environment.MAX_CONNECTED)
    assert environ == {}
    environment.connect_on_demand(environment.MAX_CONNECTED + 1)
    assert environ == {"TORCH_GLOO_LAZY_INIT": "1"}
    environ["TORCH_GLOO_LAZY_INIT"] = "0"  # a user's choice
    environment.connect_on_demand(environment.MAX_CONNECTED + 1)
    assert environ == {"TORCH_GLOO_LAZY_INIT": "0"}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets in /proc")
def test_gloo_obeys() -> None:
    """This torch knows the variable: ranks hold fewer sockets, and a broadcast works."""
    now, on_demand = (connections(16, lazy) for lazy in (False, True))
    assert now["sockets_per_rank"] > 15 > on_demand["after_a_broadcast"] > on_demand["sockets_per_rank"]
