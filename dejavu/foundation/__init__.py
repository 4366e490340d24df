"""What every room stands on: compiled loops, the cache of the user, strict YAML, names for values."""
