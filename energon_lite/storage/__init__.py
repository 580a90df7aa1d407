"""Bytes: tar and JSONL files, and their metadata."""
