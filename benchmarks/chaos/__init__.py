"""Whole flows with random faults in them; after each, what must not be left or lost."""
