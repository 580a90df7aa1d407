"""The browser that draws the pages, and where its pictures for the docs go."""

from __future__ import annotations

import os
import shutil

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
IMAGES = os.environ.get("PREVIEW_IMAGES")
MAX_IMAGE_BYTES = 200_000
