"""What it takes to keep a stage's optimizer, or its weights, elsewhere than on its devices.

updates.py  the gradients' way there, the update by the node's processors, the weights' way back
weights.py  each layer's weights on their way to its passes, and its gradients back
"""
