"""Solvers of the choice problem: one price, each checked against the others."""
