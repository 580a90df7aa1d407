"""Leaf datasets: the samples of a prepared folder."""
