"""Record to MLflow: one run for a flow, child runs for its parts; a failing MLflow never stops the flow.

Written by the flow's own process alone. Only this package imports mlflow: `server.py` to write, `reading.py` to read,
`model.py` to save a trained model, `database.py` to upgrade an older database.
"""

from dejavu.track.database import DatabaseError
from dejavu.track.live import Curve, sampled_ranks
from dejavu.track.model import ModelError, save_model
from dejavu.track.reading import (
    FOLDER_TAG,
    VERDICT_TAG,
    RecordedRun,
    RunSummary,
    find_run,
    recorded,
    report_of,
    runs,
    writes_report,
)
from dejavu.track.run import DataSet, Metric, Run, Tracker
from dejavu.track.server import Server, sweep_killed, tracking_uri

__all__ = [
    "FOLDER_TAG",
    "VERDICT_TAG",
    "Curve",
    "DataSet",
    "DatabaseError",
    "Metric",
    "ModelError",
    "RecordedRun",
    "Run",
    "RunSummary",
    "Server",
    "Tracker",
    "find_run",
    "recorded",
    "report_of",
    "runs",
    "sampled_ranks",
    "save_model",
    "sweep_killed",
    "tracking_uri",
    "writes_report",
]
