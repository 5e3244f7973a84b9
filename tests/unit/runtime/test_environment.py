"""What libraries are told through the environment, unless the user has told them something else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support.simulated_ranks import connections
from titanlite.config.component import ConfigError
from titanlite.runtime import environment
from titanlite.runtime.environment import Place, place
from titanlite.runtime.process_group import Comm, _wait_for_store
from titanlite.runtime.rendezvous import NotReached


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
        "cli.run(['generate', '.'])\n"
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


def test_an_interface_that_does_not_exist_is_refused(environ: dict[str, str]) -> None:
    known = [name for _, name in socket.if_nameindex()]
    environ["GLOO_SOCKET_IFNAME"] = ",".join(known)
    environment.check_interfaces()
    environ["GLOO_SOCKET_IFNAME"] += ",eth99"
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=eth99: .*\(known: .*lo"):
        environment.check_interfaces()


# ---- the place of this process

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place()),
        ({"RANK": "5", "LOCAL_RANK": "5"}, Place()),  # left behind by another program
        ({"RANK": "node-3", "WORLD_SIZE": "1"}, Place()),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, Place()),
        (TORCHRUN, Place(3, 4, 1, 2)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, Place(3, 4, 0, 1)),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}, Place(3, 4, 3, 1)),  # of an unknown number
    ],
)
def test_the_place_of_this_process(
    environ: dict[str, str], variables: dict[str, str], expected: Place
) -> None:
    environ |= variables
    assert place() == expected
    assert environment.is_first_local_rank() == (expected.local_rank == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc, LOCAL_WORLD_SIZE=2: expected an integer >= 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0, .*: expected an integer >= 1"),
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2: expected an integer from 0 to 3"),
        ({"RANK": ""}, "RANK is not set, WORLD_SIZE=4, .*: expected an integer from 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, .*: expected an integer from 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8, WORLD_SIZE=4: expected an integer from 1 to 4"),
    ],
)
def test_variables_that_do_not_fit_together(
    environ: dict[str, str], changes: dict[str, str], message: str
) -> None:
    environ |= TORCHRUN | changes
    with pytest.raises(ConfigError, match=f"^{message}"):
        place()
    assert environment.is_first_local_rank(), "nobody would report the error"


@pytest.mark.parametrize("host", ["", "no such host", "a..b"])
def test_rank_zero_needs_an_address(environ: dict[str, str], host: str) -> None:
    environ |= TORCHRUN | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    assert environment.store_address() == ("localhost", 29511, True)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert environment.store_address() == ("localhost", 29511, False)
    environ["MASTER_ADDR"] = host
    with pytest.raises(ConfigError, match=f"^MASTER_ADDR={host}: .*expected the host of rank 0"):
        environment.store_address()


def test_the_wait_for_rank_zero_ends(environ: dict[str, str]) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        environ |= TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        with pytest.raises(NotReached, match=r"^rank 0 does not answer at 127\.0\.0\.1:"):
            _wait_for_store(3, Comm(init_timeout_seconds=1))
        _wait_for_store(0, Comm(init_timeout_seconds=1))  # rank 0 opens the port
        s.listen()
        _wait_for_store(3, Comm(init_timeout_seconds=1))


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
