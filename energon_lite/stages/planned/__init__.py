"""Lists of samples arranged by a length index before anything is read."""
