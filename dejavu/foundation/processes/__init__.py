"""Processes: who started which and when, and objects that live in forked ones.

parents.py   a process that ends with its parent
start.py     which process a pid means
files.py     files that other processes read while they are written
homes.py     objects shared out among forked processes, each of which keeps what it computes about its own
"""
