"""Formats of files of samples: tar and JSONL, their metadata and indexes."""
