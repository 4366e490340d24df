"""The ways to know what a pass of a layer takes: measured, interpolated, predicted."""
