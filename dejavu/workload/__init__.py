"""What is trained: the workload's schema (settings.py, and its parts), the data sets (data/), the models (models/)."""

from __future__ import annotations

from dejavu.workload.data_settings import (
    ExamplesSettings,
    ImageFolderSettings,
    ParquetSettings,
    SyntheticSettings,
    TokenizerSettings,
    TokensSettings,
)
from dejavu.workload.gradient_settings import GradientSettings
from dejavu.workload.settings import AUTO, Workload
from dejavu.workload.training_settings import (
    COMPARED_PART,
    HALVED_PART,
    LEAST_RUNG_STEPS,
    TRIED_PART,
    OptimizerSettings,
    ReplanSettings,
    TrialSettings,
)

__all__ = [
    "AUTO",
    "COMPARED_PART",
    "HALVED_PART",
    "LEAST_RUNG_STEPS",
    "TRIED_PART",
    "ExamplesSettings",
    "GradientSettings",
    "ImageFolderSettings",
    "OptimizerSettings",
    "ParquetSettings",
    "ReplanSettings",
    "SyntheticSettings",
    "TokenizerSettings",
    "TokensSettings",
    "TrialSettings",
    "Workload",
]
