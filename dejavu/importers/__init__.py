"""Others' profiles and problems into ours: one file for each."""
