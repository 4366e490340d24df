"""Communication costs: transfers between stages, collectives inside them."""
