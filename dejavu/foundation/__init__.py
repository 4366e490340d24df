"""The lowest layer, which every package may import: compiled loops, the user's cache, strict YAML, hashes of values."""
