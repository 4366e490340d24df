"""Sources of a layer's pass times: measured, interpolated, predicted."""
