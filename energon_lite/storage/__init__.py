"""Bytes: files of this machine and of others, by ranges, and YAML."""
