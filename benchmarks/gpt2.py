"""Counts GPT-2 tokens, without a download: byte pairs merged in the order of a list."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

# As GPT-2's pattern, with classes that Python knows.
_WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class TokenCounter:
    """Counts the tokens of texts; as tiktoken's "gpt2" does.

    Args:
        merges: GPT-2's `vocab.bpe`.
    """

    def __init__(self, merges: Path) -> None:
        lines = merges.read_text("utf-8").split("\n")[1:-1]
        self._ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._letters = {byte: chr(byte) for byte in printable}
        self._letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
        self._of_word = functools.cache(self._merged)

    def __call__(self, text: str) -> int:
        """Returns the number of tokens."""
        return sum(self._of_word(found.group()) for found in _WORDS.finditer(text))

    def _merged(self, word: str) -> int:
        parts = [self._letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            first = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if first not in self._ranks:
                break
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == first and not merged[-1].startswith("\0"):
                    merged[-1] = "\0" + merged[-1] + part  # it takes no third one in this round
                else:
                    merged.append(part)
            parts = [part.lstrip("\0") for part in merged]
        return len(parts)
