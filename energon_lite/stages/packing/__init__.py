"""Several samples in one sequence: lists of samples, and what becomes of each."""
