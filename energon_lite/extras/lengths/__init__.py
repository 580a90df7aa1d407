"""The lengths of all samples of a dataset, measured once and stored beside the data."""
