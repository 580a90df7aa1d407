"""Formats of files of samples: tars, their metadata and indexes, and the table of all formats."""
