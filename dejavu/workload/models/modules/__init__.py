"""Modules that several models of the zoo are made of."""
