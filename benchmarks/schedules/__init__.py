"""Every schedule on the same problems, slices of sequences, and what late gradients do to a loss."""
