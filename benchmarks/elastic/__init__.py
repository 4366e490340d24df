"""A training while its cluster changes: how soon it goes on, what is lost, how good the plan is that it goes on with.

site.py      four emulated hosts of a part of a core each, and a fifth from which they are launched
prices.py    what a workload's layers cost there, and the plans to begin with
faults.py    what happens to the hosts in the middle of a training
running.py   a training with a fault, ours and torchrun's
"""
