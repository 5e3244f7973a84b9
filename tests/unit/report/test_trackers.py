"""Pins what a tracker gets: each step once after kills, resumes and rewinds, a branch when a run goes back
and continues with something else, and what was missed. test_tracker_libraries.py has the real libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.trackers import RUN_ID, FakeClient, Server, deliver, values
from titanlite.metrics.sinks.base import Event, RunInfo, Values
from titanlite.metrics.sinks.jsonl import JsonLines
from titanlite.metrics.sinks.samples import Samples
from titanlite.report.trackers.tracker import Delivery, TrackerRun, keys_as_text, numbers_of

BRANCH = f"{RUN_ID}-b1"


class Course:
    """A start of a run: writes metrics.jsonl and samples.txt, and sends to the tracker."""

    def __init__(self, folder: Path, client: FakeClient, resumed_step: int = 0, load_step: int = -1):
        self.lines = JsonLines(folder / "metrics.jsonl", resumed_step)
        self.texts = Samples(folder / "samples.txt", resumed_step)
        self.delivery = deliver(folder, client, resumed_step, load_step=load_step)

    def steps(self, first: int, last: int, sends: bool = True, **change: Any) -> Course:
        """Take steps. `sends`: false if the process is killed before the tracker's thread gets to them.
        `change`: arguments of `values`."""
        for step in range(first, last + 1):
            self.lines.write(step, values(step, **change))
            if sends:
                self.delivery.write(step, values(step, **change))
        return self

    def event(self, step: int, event: Event, about: Values = MappingProxyType({})) -> Course:
        for sink in (self.lines, self.texts, self.delivery):
            sink.event(step, event, about)
        return self

    def texts_of(self, step: int) -> None:
        for text in ("once", "upon"):
            self.texts.sample(step, text)
            self.delivery.sample(step, text)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_run_is_sent_with_its_configuration_samples_and_events(tmp_path: Path, server: Server) -> None:
    delivery = deliver(tmp_path, FakeClient(server))
    delivery.write(1, values(1) | {"eval/loss": float("nan")})
    delivery.sample(1, "once")
    delivery.sample(1, "upon \ud800")
    delivery.event(1, "saved", {})
    delivery.event(2, "spike", {"loss": 9.0, "reason": "high"})
    delivery.close()
    assert server.runs[RUN_ID].name == tmp_path.name
    assert server.runs[RUN_ID].config == {
        "training": {"steps": 10}, "checkpoint": {}, "metrics": {}, "run_id": RUN_ID,
    }  # fmt: skip
    (first, saved, spike) = server.metrics[RUN_ID]
    assert str(first) == "(1, {'train/loss': 9.0, 'train/learning_rate': 0.1, 'eval/loss': nan})"
    assert saved == (1, {"events/saved": 1})
    assert spike == (2, {"events/spike": 1, "events/spike_loss": 9.0})
    assert server.samples[RUN_ID] == [(1, 0, "once"), (1, 1, "upon ?")]
    assert server.ended == [(RUN_ID, False)]


def test_after_a_kill_every_step_is_there_once(tmp_path: Path, server: Server) -> None:
    first = Course(tmp_path, FakeClient(server)).steps(1, 2).steps(3, 4, sends=False)
    first.delivery.write(5, values(5))  # sent, but the kill came before the line of metrics.jsonl
    Course(tmp_path, FakeClient(server), 4).steps(5, 10).delivery.close()
    assert sorted(server.steps()) == list(range(1, 11))
    assert server.runs.keys() == {RUN_ID}
    assert server.ended == [(RUN_ID, True)]


def test_without_the_journal_steps_would_be_there_twice(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 6)
    (tmp_path / "trackers/fake.jsonl").unlink()
    Course(tmp_path, FakeClient(server), 4).steps(5, 6)
    assert server.steps() != list(range(1, 7))


def test_a_torn_line_of_the_journal_loses_one_record(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 6)
    journal = tmp_path / "trackers/fake.jsonl"
    journal.write_bytes(journal.read_bytes()[:-3])
    Course(tmp_path, FakeClient(server), 6).steps(7, 8)
    Course(tmp_path, FakeClient(server), 8).steps(9, 9)
    assert server.steps() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9]


def test_samples_and_events_are_there_once(tmp_path: Path, server: Server) -> None:
    for resumed_step in (0, 2, 4):
        course = Course(tmp_path, FakeClient(server), resumed_step).steps(resumed_step + 1, 4)
        for sink in (course.texts, course.delivery):
            for text in ("a", "b\nc") if resumed_step < 4 else ():
                sink.sample(4, text)
        course.delivery.event(4, "saved", {})
    assert server.samples[RUN_ID] == [(4, 0, "a"), (4, 1, "b\nc")]
    assert [step for step, numbers in server.metrics[RUN_ID] if "events/saved" in numbers] == [4]


def test_samples_that_were_missed_are_sent_from_the_file(tmp_path: Path, server: Server) -> None:
    course = Course(tmp_path, FakeClient(server)).steps(1, 4)
    for text in ("a", "b\nc"):
        course.texts.sample(4, text)
    Course(tmp_path, FakeClient(server), 4)
    assert server.samples[RUN_ID] == [(4, 0, "a"), (4, 1, "b\nc")]


@pytest.mark.parametrize("change", [{"data": "b"}, {"lr": 0.2}, {"loss": 10.1}])
def test_other_data_learning_rates_or_losses_begin_a_branch_with_the_steps_before(
    tmp_path: Path, server: Server, change: dict[str, Any]
) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 8)
    Course(tmp_path, FakeClient(server), 4).steps(5, 6).steps(7, 10, **change).delivery.close()
    assert server.steps() == list(range(1, 9))  # the old course stays as it was
    assert server.steps(BRANCH) == list(range(1, 11))
    assert server.runs[BRANCH].name == f"{tmp_path.name}@6"
    config = server.runs[BRANCH].config
    assert (config["branched_from"], config["branched_at_step"]) == (RUN_ID, 6)
    Course(tmp_path, FakeClient(server), 8).steps(9, 10, **change)
    assert server.steps(BRANCH) == list(range(1, 11))  # a resume continues the branch
    assert server.runs.keys() == {RUN_ID, BRANCH}


@pytest.mark.parametrize(
    ("job", "num_runs"),
    [
        ({"optimizer": {"weight_decay": 0.1}}, 1),
        ({"optimizer": {"weight_decay": 0.1}, "parallelism": {"tensor_parallel_degree": 2}}, 1),
        ({"optimizer": {"weight_decay": 0.2}}, 2),
        ({"training": {"max_norm": 2.0}}, 2),
    ],
)
def test_losses_of_repeated_steps_may_differ_by_rounding_with_the_same_settings(
    tmp_path: Path, server: Server, job: dict[str, Any], num_runs: int
) -> None:
    """The first repeated step has the loss that was sent: other settings show in the second."""
    for resumed_step, settings, loss in ((0, {"optimizer": {"weight_decay": 0.1}}, 10.0), (4, job, 10.001)):
        run = RunInfo(folder=tmp_path, run_id=RUN_ID, job=settings, resumed_step=resumed_step, total_steps=8)
        delivery = Delivery(FakeClient(server), run, "", tmp_path / "trackers/fake.jsonl")
        lines = JsonLines(tmp_path / "metrics.jsonl", resumed_step)
        for step in range(resumed_step + 1, 9):
            record = values(step, loss=10.0 if step <= 5 else loss)
            lines.write(step, record)
            delivery.write(step, record)
    assert len(server.runs) == num_runs
    assert server.steps() == list(range(1, 9))
    if num_runs == 2:
        assert server.runs[BRANCH].config["branched_at_step"] == 5
        assert server.metrics[BRANCH][5][1]["train/loss"] == 10.001 - 6


def test_a_copy_of_a_run_folder_is_a_branch_of_its_own(tmp_path: Path, server: Server) -> None:
    """Both folders go on, the copy is resumed twice, and a moved folder stays the same run."""

    def start(name: str, resumed_step: int, last: int, **change: Any) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        run = RunInfo.identify(folder, {}, resumed_step, total_steps=10)
        lines = JsonLines(folder / "metrics.jsonl", resumed_step)
        delivery = Delivery(FakeClient(server), run, "", folder / "trackers/fake.jsonl")
        for step in range(resumed_step + 1, last + 1):
            lines.write(step, values(step, **change))
            delivery.write(step, values(step, **change))
        return run.run_id

    first = start("a", 0, 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert start("a", 4, 8) == first
    copy = start("b", 4, 7, lr=0.2)
    (tmp_path / "b").rename(tmp_path / "c")
    assert start("c", 6, 8, lr=0.2) == copy
    assert server.runs.keys() == {first, copy}
    assert server.steps(first) == server.steps(copy) == list(range(1, 9))
    assert server.metrics[first][4][1]["train/learning_rate"] == 0.1
    assert server.metrics[copy][4][1]["train/learning_rate"] == 0.2
    assert server.runs[copy].config == {
        "metrics": {}, "run_id": copy, "branched_from": first, "branched_at_step": 4
    }  # fmt: skip
    assert server.runs[copy].name == "c@4"


def test_a_rewind_in_the_process_begins_a_branch(tmp_path: Path, server: Server) -> None:
    course = Course(tmp_path, FakeClient(server)).steps(1, 8)
    course.texts_of(8)
    course.event(4, "rewound", {"reason": "spike"}).steps(5, 8, data="b")
    course.texts_of(8)
    course.steps(9, 10, data="b").delivery.close()
    assert server.steps() == list(range(1, 9))
    assert server.steps(BRANCH) == list(range(1, 11))
    shown = [numbers for _, numbers in server.metrics[BRANCH]]
    assert shown[4:6] == [{"events/rewound": 1}, numbers_of(values(5, "b"))]
    assert server.samples[RUN_ID] == server.samples[BRANCH] == [(8, 0, "once"), (8, 1, "upon")]


def test_a_resume_after_a_rewind_continues_its_branch(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 8).event(4, "rewound").steps(5, 7, data="b")
    Course(tmp_path, FakeClient(server), 6).steps(7, 10, data="b").delivery.close()
    assert server.runs.keys() == {RUN_ID, BRANCH}
    assert server.steps(BRANCH) == list(range(1, 11))


def test_a_run_that_is_killed_after_its_rewind_rewinds_again(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 8).event(4, "rewound").steps(5, 6, data="b")
    again = Course(tmp_path, FakeClient(server), 4).steps(5, 8)  # no checkpoint knew of the rewind
    again.event(4, "rewound").steps(5, 10, data="b").delivery.close()
    last = list(server.runs)[-1]
    assert server.steps() == list(range(1, 9))
    assert server.steps(last) == list(range(1, 11))
    assert server.metrics[last][-1][1] == numbers_of(values(10, "b"))
    assert all(server.steps(run) == sorted(set(server.steps(run))) for run in server.runs)


def test_a_rewind_of_which_the_tracker_has_nothing_begins_no_branch(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 4).event(4, "rewound").steps(5, 6, data="b")
    assert server.runs.keys() == {RUN_ID}
    assert server.steps() == list(range(1, 7))


def test_a_rewind_that_is_lost_to_a_full_queue_begins_a_branch(tmp_path: Path, server: Server) -> None:
    course = Course(tmp_path, FakeClient(server)).steps(1, 8)
    course.lines.event(4, "rewound", {})
    course.steps(5, 10, data="b")
    assert server.steps() == list(range(1, 9))
    assert server.steps(BRANCH) == list(range(1, 11))


def test_a_branch_that_cannot_begin_is_tried_again(tmp_path: Path, server: Server) -> None:
    class Refusing(FakeClient):
        def begin(self, run: TrackerRun) -> str:
            if self.broken:
                raise ConnectionError
            return super().begin(run)

    client = Refusing(server)
    course = Course(tmp_path, client).steps(1, 6)
    client.broken = True
    for _ in range(2):
        with pytest.raises(ConnectionError):
            course.event(4, "rewound")
    with pytest.raises(ConnectionError):
        course.steps(5, 5, data="b")
    client.broken = False
    course.steps(6, 9, data="b").delivery.close()
    assert server.steps() == list(range(1, 7))
    assert sorted(server.steps(BRANCH)) == list(range(1, 10))
    assert server.runs.keys() == {RUN_ID, BRANCH}


def test_going_back_with_load_step_begins_one_branch(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 8)
    for _ in range(2):  # the second start repeats the first, which was killed before it saved
        Course(tmp_path, FakeClient(server), 4, load_step=4).steps(5, 10)
    assert server.steps(BRANCH) == list(range(1, 11))
    assert server.runs.keys() == {RUN_ID, BRANCH}


def test_a_course_that_was_trained_without_the_tracker_is_a_branch(tmp_path: Path, server: Server) -> None:
    Course(tmp_path, FakeClient(server)).steps(1, 6)
    other = JsonLines(tmp_path / "metrics.jsonl", 4)
    for step in (5, 6):
        other.write(step, values(step, "b"))
    other.close()
    Course(tmp_path, FakeClient(server), 6).steps(7, 7)
    assert server.steps() == list(range(1, 7))
    assert server.steps(BRANCH) == list(range(1, 8))
    assert server.runs[BRANCH].config["branched_at_step"] == 4


def test_another_target_gets_the_whole_run(tmp_path: Path) -> None:
    offline, online = Server(), Server()
    Course(tmp_path, FakeClient(offline, "offline")).steps(1, 4)
    Course(tmp_path, FakeClient(online, "online"), 4).steps(5, 6)
    assert online.steps() == list(range(1, 7))


def test_steps_that_the_tracker_has_lost_are_sent_again(tmp_path: Path, server: Server) -> None:
    class Forgetful(FakeClient):
        def known_steps(self, sent: set[int]) -> set[int]:
            return sent - {3} | {5}

    Course(tmp_path, FakeClient(server)).steps(1, 4)
    Course(tmp_path, Forgetful(server), 4).steps(5, 6)
    assert server.steps() == [1, 2, 3, 4, 3, 6]


def test_what_failed_is_sent_at_the_end(tmp_path: Path, server: Server) -> None:
    client = FakeClient(server)
    course = Course(tmp_path, client).steps(1, 2)
    client.broken = True
    with pytest.raises(ConnectionError):
        course.steps(3, 3)
    client.broken = False
    course.steps(4, 4).delivery.close()
    assert server.steps() == [1, 2, 4, 3]


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path, server: Server) -> None:
    lines = [json.dumps({"step": step, **values(step)}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([lines[0], "{", "[]", '{"step": "x"}', lines[2], '{"st'])
    )
    deliver(tmp_path, FakeClient(server), 3)
    assert server.steps() == [1, 3]


def test_numbers_of_a_record() -> None:
    record = {"a": 1, "b": "nan", "c": "-inf", "sha": "1234567890123456", "d": 0.5}
    assert str(numbers_of(record)) == "{'a': 1, 'b': nan, 'c': -inf, 'd': 0.5}"


def test_flat_configuration() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": [{"e": True}], "f": "text"}
    assert dict(keys_as_text(tree)) == {"a.b": "1", "a.c": "{}", "d": '[{"e": true}]', "f": "text"}


def test_a_delivery_that_cannot_begin_can_be_tried_again(tmp_path: Path, server: Server) -> None:
    class Refusing(FakeClient):
        def begin(self, run: object) -> str:
            raise ConnectionError

    Course(tmp_path, FakeClient(server)).steps(1, 2)
    with pytest.raises(ConnectionError):
        deliver(tmp_path, Refusing(server), 2)
    assert isinstance(deliver(tmp_path, FakeClient(server), 2), Delivery)
    assert server.steps() == [1, 2]
