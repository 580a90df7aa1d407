"""Bytes: tar files, their metadata, and how parts become values."""
