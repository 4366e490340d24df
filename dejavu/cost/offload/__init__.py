"""What it takes to keep a stage's optimizer elsewhere than on its devices.

updates.py  the gradients' way there, the update by the node's processors, the weights' way back
"""
