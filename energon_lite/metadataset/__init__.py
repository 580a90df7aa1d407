"""Metadatasets: YAML files that name datasets, and how they are blended and repeated."""

from energon_lite.names.energon_modules import energon_names

__getattr__ = energon_names(__name__)
