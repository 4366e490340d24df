"""What happens to gradients between the backward passes and the optimizer: tied weights, loss scaling."""
