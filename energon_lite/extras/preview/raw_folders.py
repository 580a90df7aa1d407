"""Shows the parts of a dataset whose own code may not run, in place of its samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.view.fields import short_text
from energon_lite.metadataset.nodes import Leaf
from energon_lite.metadataset.open import LeafOpener
from energon_lite.sources.dataset_classes import CrudeWebdataset
from energon_lite.sources.dataset_config import WAY_OUT
from energon_lite.sources.source_factory import SourceFactory

logger = logging.getLogger(__name__)


class RawFolder(CrudeWebdataset):
    """A folder as the parts of its samples, whatever its `dataset.yaml` makes of them."""


class RawOpener(LeafOpener):
    """Opens datasets that need trust as their parts; of a join those of its first dataset."""

    def open(self, leaf: Leaf) -> SourceFactory[Any]:
        """Opens the folder of a leaf."""
        try:
            return super().open(leaf)
        except DatasetFormatError as error:
            if WAY_OUT not in str(error):
                raise
        folder = leaf.folders[0]
        factory = RawFolder(
            folder.path, split_config=folder.split_config, split_part=folder.split_part,
            decoder=self.decoder, **self._settings_of(leaf),
        )  # fmt: skip
        self.factories.append(factory)
        return factory


def raw_notice(factories: Sequence[SourceFactory[Any]]) -> str:
    """Returns, and logs, which sources are shown raw; empty if none is."""
    names = [factory.name for factory in factories if isinstance(factory, RawFolder)]
    if not names:
        return ""
    text = (
        f"Shown raw, by the parts in the files: {short_text(', '.join(names), 200)}. Their samples "
        "are made by code that the data name; --trust runs it, and shows these samples"
    )
    logger.warning(text)
    return text
