"""Everything here imports `megatron.energon`, which is this library.

With ENERGON_REAL=1, and a Python that has it, it is Megatron-Energon itself: so the tests of its
documentation can be compared with it.
"""

import os

import energon_lite

if not os.environ.get("ENERGON_REAL"):
    energon_lite.as_energon()
