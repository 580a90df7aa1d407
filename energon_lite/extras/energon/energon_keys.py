"""Energon's functions on the sources and restore keys of samples."""

from __future__ import annotations

from typing import Any, TypeVar

from energon_lite.core.samples import field_of, with_entry
from energon_lite.core.state import RestoreKey

T = TypeVar("T")


def get_source_info(sample: Any) -> list[Any] | None:
    """Returns the sources of a sample or dict; None where it has none."""
    sources = field_of(sample, "__sources__")
    return None if sources is None else list(sources)


def get_sample_restore_key(sample: Any) -> RestoreKey | None:
    """Returns the restore key of a sample or dict; None where it has none."""
    key: RestoreKey | None = field_of(sample, "__restore_key__")
    return key


def set_sample_restore_key(sample: T, *key: int | str, src: Any, fail_otherwise: bool = False) -> T:
    """Replaces the restore key of a sample or dict that has one, in place.

    Args:
        sample: the sample.
        key: what comes after the name of the class of `src`.
        src: the dataset that makes the sample.
        fail_otherwise: refuse a value without a restore key, instead of passing it on.

    Raises:
        TypeError: The value has no restore key, and `fail_otherwise` is set.
    """
    return _put_key(sample, (type(src).__name__, *key), src, fail_otherwise)


def add_sample_restore_key(sample: T, *key: int | str, src: Any, fail_otherwise: bool = False) -> T:
    """Puts a name in front of the restore key of a sample or dict that has one, in place.

    Args:
        sample: the sample.
        key: what comes between the name of the class of `src` and the key that there is.
        src: the dataset that makes the sample.
        fail_otherwise: refuse a value without a restore key, instead of passing it on.

    Raises:
        TypeError: The value has no restore key, and `fail_otherwise` is set.
    """
    inner = get_sample_restore_key(sample) or ()
    return _put_key(sample, (type(src).__name__, *key, *inner), src, fail_otherwise)


def _put_key(sample: T, key: RestoreKey, src: Any, fail_otherwise: bool) -> T:
    if get_sample_restore_key(sample) is not None:
        return with_entry(sample, "__restore_key__", key)
    if fail_otherwise:
        raise TypeError(
            f"{type(src).__name__} made a {type(sample).__qualname__} without __restore_key__, "
            "which cannot be re-created. Return a Sample, or a dict with basic_sample_keys(sample)."
        )
    return sample
