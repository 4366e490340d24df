"""A running plan improved from what the training measures: by gradient steps on A, and by the exact search.

problems.py    problems whose prices are wrong, and what is true
simulated.py   trainings of them by a clock that is simulated: many, and without this machine's noise
trainings.py   real ranks over gloo, beside one process
complexity.py  what a gradient step takes over layers and strategies
"""
