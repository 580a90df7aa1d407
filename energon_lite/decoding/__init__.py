"""Decodes parts: images, arrays, audio and video; reads the metadata of media."""
