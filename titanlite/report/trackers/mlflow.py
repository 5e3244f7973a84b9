"""The sink mlflow: MLflow, through its client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titanlite.metrics.sinks.base import RunInfo
from titanlite.report.trackers.tracker import Client, Numbers, Tracker, TrackerRun, keys_as_text

ID_TAG = "titanlite.run_id"
MAX_METRICS, MAX_PARAMS, MAX_CHARACTERS = 1000, 100, 6000  # of one request; of one parameter
EVERY_RECORD_HAS = "train/loss"


@dataclass(frozen=True, kw_only=True)
class MLflow(Tracker, name="mlflow"):
    """MLflow. mlflow's environment variables of server and experiment, such as MLFLOW_TRACKING_TOKEN, hold,
    too."""

    tracking_uri: str = ""
    """Server or database; empty: MLFLOW_TRACKING_URI, else mlflow's default."""
    experiment: str = ""
    """Experiment, made if missing; empty: MLFLOW_EXPERIMENT_NAME, else titanlite."""

    def client(self, run: RunInfo) -> Client:
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        experiment = self.experiment or MLFLOW_EXPERIMENT_NAME.get() or "titanlite"
        return MLflowClient(self.tracking_uri or mlflow.get_tracking_uri(), experiment)


class MLflowClient(Client):
    """Finds the run by its tag. MLflow would keep a step twice, so known_steps asks which ones it has."""

    def __init__(self, uri: str, experiment: str):
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run_id = ""

    def begin(self, run: TrackerRun) -> str:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([number], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._run_id, recorded = runs[0].info.run_id, runs[0].data.params
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            made = self._client.create_run(number, run_name=run.name, tags={ID_TAG: run.id})
            self._run_id, recorded = made.info.run_id, dict[str, str]()
        self._send_config({key: value[:MAX_CHARACTERS] for key, value in keys_as_text(run.config)}, recorded)
        return f"{self._uri.rpartition('@')[2]} {self._experiment}"  # without a password

    def _send_config(self, config: dict[str, str], recorded: dict[str, str]) -> None:
        """Parameters of a run cannot be changed; a tag `changed.KEY` has the value of a resumed run."""
        from mlflow.entities import Param

        new = (Param(key, value) for key, value in config.items() if key not in recorded)
        while params := list(islice(new, MAX_PARAMS)):
            self._client.log_batch(self._run_id, params=params)
        for key, value in recorded.items():
            if key in config and config[key] != value:
                self._client.set_tag(self._run_id, f"changed.{key}", config[key])

    def known_steps(self, sent: set[int]) -> set[int]:
        return {metric.step for metric in self._client.get_metric_history(self._run_id, EVERY_RECORD_HAS)}

    def log(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = (Metric(key, value, now_ms, step) for key, value in numbers.items())
        while batch := list(islice(metrics, MAX_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)

    def sample(self, step: int, index: int, text: str) -> None:
        self._client.log_text(self._run_id, text, f"samples/step-{step:08}-{index}.txt")

    def end(self, is_complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_complete else "KILLED")
