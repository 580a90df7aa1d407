"""Leaf datasets: what a prepared folder gives."""
