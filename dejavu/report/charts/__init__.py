"""The page's interactive figures. Each function returns a new plotly figure, whose colours are names of the page's CSS.

A colour is written `var(--forward)`; the page's script puts in what that is in light or in dark. Every text from a
model, a cluster or a failure goes through `plain`, because plotly reads some HTML.
"""

from dejavu.report.charts.outcome import accuracy_chart, losses_chart, slice_charts
from dejavu.report.charts.planning import convergence_chart, counts_chart, layers_chart
from dejavu.report.charts.steps import memory_chart, timeline_chart

__all__ = [
    "accuracy_chart",
    "convergence_chart",
    "counts_chart",
    "layers_chart",
    "losses_chart",
    "memory_chart",
    "slice_charts",
    "timeline_chart",
]
