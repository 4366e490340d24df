"""What several searches work on: options, tables of stages, clocks, rows of even splits."""
