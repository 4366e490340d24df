"""Gradients of replicas, summed while the last backward pass computes, and at its end."""
