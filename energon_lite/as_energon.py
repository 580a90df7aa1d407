"""Runs a script or a module in which `import megatron.energon` finds this library.

    python -m energon_lite.as_energon train.py ARGUMENTS...
    python -m energon_lite.as_energon -m MODULE ARGUMENTS...
    torchrun ... -m energon_lite.as_energon train.py ARGUMENTS...
    python -m energon_lite.as_energon --install-command [FOLDER]

The script or module runs as `__main__`, also again in processes that it spawns. The last form
writes a command `energon`, for shell scripts.
"""

import os
import sys
from pathlib import Path

from energon_lite.extras.energon.alias import as_energon, install_command, main_code

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[:1] == ["--install-command"]:
        install_command(*sys.argv[1:2])
        sys.exit()
    _module = sys.argv[:1] == ["-m"]
    del sys.argv[:_module]
    if not sys.argv:
        sys.exit("usage: python -m energon_lite.as_energon SCRIPT | -m MODULE [ARGUMENTS...]")
    sys.path[0] = str(Path.cwd() if _module else Path(sys.argv[0]).resolve().parent)
    # multiprocessing runs this module again in a spawned process, with another sys.argv[0].
    os.environ["ENERGON_LITE_SCRIPT"] = "-m " * _module + sys.argv[0]

if __name__ in ("__main__", "__mp_main__"):
    as_energon()
    _code, _names = main_code(os.environ["ENERGON_LITE_SCRIPT"])
    globals().update(_names)
    exec(_code)
else:
    # So `energon_lite.as_energon` is the function, whatever was imported.
    sys.modules[__name__] = as_energon  # type: ignore[assignment]
