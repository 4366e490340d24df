"""What communication takes: transfers between stages, collectives inside them."""
