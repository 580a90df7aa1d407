"""How costs grow with ranks, streams, sources, samples and buffers, simulated on one machine."""
