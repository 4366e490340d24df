"""Running for real: measuring, stages, ranks, the launcher, checkpoints. The only place with process groups."""
