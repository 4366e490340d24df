"""Timing on a machine that is not quiet: clocks, repeats, and detection of interference by other programs."""
