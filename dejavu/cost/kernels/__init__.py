"""Kernel times on one device: roofline, learned predictor, calibration, parts of sharded layers."""
