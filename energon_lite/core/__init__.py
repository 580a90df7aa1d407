"""The base of everything: errors, seeds, topology, samples, state, the two types of a stage."""
