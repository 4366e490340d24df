"""Bounds on plans with every number of ranks at once, before any is looked at by itself."""
