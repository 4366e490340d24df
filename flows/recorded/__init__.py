"""The commands that read what runs left: their records, pages, weights and decisions."""
