"""Compile what every planning runs."""

from dejavu.planning.loops import load_compiled_loops

if __name__ == "__main__":
    load_compiled_loops()
