"""Batches of one group of samples, the same in all streams at each cycle."""
