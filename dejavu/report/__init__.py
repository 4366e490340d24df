"""A run's results for people: figures, one self-contained page, and the short table at the end of a command."""

from dejavu.report.data import Migration, ReportData, StageReport
from dejavu.report.figures import losses_figure, timeline_figure
from dejavu.report.page import page
from dejavu.report.space import space_figure
from dejavu.report.summary import WIDTH_COLUMNS, page_in, summary_markdown, summary_table, where_to_look

__all__ = [
    "WIDTH_COLUMNS",
    "Migration",
    "ReportData",
    "StageReport",
    "losses_figure",
    "page",
    "page_in",
    "space_figure",
    "summary_markdown",
    "summary_table",
    "timeline_figure",
    "where_to_look",
]
