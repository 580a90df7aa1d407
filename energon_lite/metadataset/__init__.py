"""Metadatasets: YAML files that name datasets, and how they are blended and repeated."""
