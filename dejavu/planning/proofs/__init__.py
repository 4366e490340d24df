"""What is proved of a request's plans: how fast any can be, and that there is none.

bounds.py      lower bounds on the simulated steps, by problem
none_found.py  why no plan was found, and whether that is proved
"""
