"""Runs a script in which `import megatron.energon` finds this library.

    python -m energon_lite.as_energon train.py ARGUMENTS...
    torchrun ... -m energon_lite.as_energon train.py ARGUMENTS...

The script runs as `__main__`, also again in processes that it spawns.
"""

import os
import sys
from pathlib import Path

from energon_lite.names.alias import as_energon

if __name__ == "__main__":
    del sys.argv[0]
    if not sys.argv:
        sys.exit("usage: python -m energon_lite.as_energon SCRIPT [ARGUMENTS...]")
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    # multiprocessing runs this module again in a spawned process, with another sys.argv[0].
    os.environ["ENERGON_LITE_SCRIPT"] = sys.argv[0]

if __name__ in ("__main__", "__mp_main__"):
    as_energon()
    __file__ = os.environ["ENERGON_LITE_SCRIPT"]
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"))
else:
    # So `energon_lite.as_energon` is the function, whatever was imported.
    sys.modules[__name__] = as_energon  # type: ignore[assignment]
