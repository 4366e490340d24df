"""Running pipelines: the same loss, predicted against measured, the gain of planning, and what survives."""
