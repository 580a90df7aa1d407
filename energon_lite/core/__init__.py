"""What everything rests on: errors, seeds, topology, samples, state, the two types of a stage."""
