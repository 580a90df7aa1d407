"""How costs grow with ranks, streams, sources, samples and buffers, by simulation on one machine."""
