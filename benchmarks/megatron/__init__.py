"""Published formulas of Megatron and of its network, as a peer of the planner's own predictions."""
