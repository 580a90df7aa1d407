"""Audio, video and the metadata of media."""
