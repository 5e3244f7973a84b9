"""The metric sinks that report/ adds: experiment trackers, which `[[metrics.sinks]]` names."""

import titanlite.report.trackers.mlflow
import titanlite.report.trackers.trackio
import titanlite.report.trackers.wandb  # noqa: F401
