"""First fit: each sample goes into the first pack that still has room for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.packing.classes import LengthClasses, sort_into_classes
from energon_lite.packing.compiled import kernel
from energon_lite.packing.lengths import Sizes, check_sizes
from energon_lite.packing.packs import Packs
from energon_lite.packing.rows import rows_of

Int64Array = npt.NDArray[np.int64]
