"""Virtual workers against one pipeline: planned for mixed clusters, and trained on unequal emulated hosts."""
