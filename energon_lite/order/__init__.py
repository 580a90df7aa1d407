"""Pure functions on integers that compute which sample comes next."""
