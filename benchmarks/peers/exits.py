"""The end of a program that runs a loader of others."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def exit_after(main: Callable[[], None]) -> None:
    """Runs a program, and ends it at once: some loaders wait for their threads or workers."""
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # the caller ends workers
