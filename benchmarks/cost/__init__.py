"""How well costs are predicted, a table for each kind of cost, with a peer beside it."""
