"""energon_lite: a data loader for multimodal training whose order is arithmetic.

The names are those of NVIDIA Megatron-Energon; see docs/architecture.md for how it works. They are
listed in `__init__.pyi`, and each is imported when it is first used.
"""

from energon_lite.names import later
from energon_lite.names.energon_modules import add_modules, lazy_names, public_homes

__version__ = "0.1.0"
__all__ = sorted([*public_homes(), "__version__"])
__getattr__ = lazy_names(
    __name__, {**dict.fromkeys(later.REASONS, later.__name__), **public_homes()}
)

add_modules()
