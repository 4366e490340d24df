"""Models as graphs: operators and layers with shapes, bytes and FLOPs, traced without weights."""
