"""Shardings of single operators over the devices of a stage, found instead of declared."""
