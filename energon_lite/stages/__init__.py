"""Datasets over datasets."""

from energon_lite.names.energon_modules import lazy_names

__getattr__ = lazy_names(__name__, {})  # sub-modules that few pipelines need
