"""Record to MLflow: one run for a flow, child runs for its parts; a failing MLflow never stops the flow.

`server.py` is the only file that imports mlflow.
"""

from dejavu.track.run import Metric, Run, Tracker
from dejavu.track.server import RunSummary, runs, sweep_killed, tracking_uri

__all__ = ["Metric", "Run", "RunSummary", "Tracker", "runs", "sweep_killed", "tracking_uri"]
