"""Datasets over datasets."""
