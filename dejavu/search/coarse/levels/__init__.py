"""The number of stages in the state of the relaxed problem: its loops, the bound under one limit, and a beam."""
