"""What users of other loaders write to decode and resize pictures: Pillow, then a tensor."""

from __future__ import annotations

import io
from typing import Any


def as_tensor(picture: Any) -> Any:
    """Makes a uint8 tensor (3, H, W)."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def resized(picture: Any, size: int) -> Any:
    """Resizes a picture of Pillow so that its shorter side is `size`, antialiased."""
    from PIL import Image

    scale = size / min(picture.size)
    width, height = (round(side * scale) for side in picture.size)
    return as_tensor(picture.resize((width, height), Image.Resampling.BICUBIC))


def decoded(payload: bytes, size: int | None = None) -> Any:
    """Decodes bytes, and resizes if a size is named."""
    from PIL import Image

    picture = Image.open(io.BytesIO(payload)).convert("RGB")
    return as_tensor(picture) if size is None else resized(picture, size)
