"""Costs by ranks, streams, sources, samples and buffers, simulated on one machine."""
