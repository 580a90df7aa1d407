"""Names that are imported on first use, and the modules of Energon."""
