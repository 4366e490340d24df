"""A backward pass in two parts: the gradients of the inputs first, those of the weights later."""
