"""Energon's own names and calls that the rest of the library does without."""
