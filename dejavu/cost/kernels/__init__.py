"""What one kernel takes on one device: roofline, what was learned from GPUs, calibration, parts of split layers."""
