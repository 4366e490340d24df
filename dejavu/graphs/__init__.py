"""What a model does: its operators and layers with shapes, bytes and arithmetic, traced without weights."""
