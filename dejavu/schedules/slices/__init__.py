"""TeraPipe: a sequence in slices (`program.py`), and what they take on a causal decoder (`decoder.py`)."""
