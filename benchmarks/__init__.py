"""Speed of the package, each figure beside a hand-written loop of the same run."""
