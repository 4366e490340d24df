"""The look for plans next to the bound, over some of the cuts, and the survey of limits beside it."""
