"""Compiling with numba: one decorator for all kernels, and when they are compiled.

A kernel is compiled when it is first called, or by `compile_all`, which belongs before worker
processes start. The machine code is kept beside the source, in `__pycache__`, or where that cannot
be written to, in the user's cache folder or `NUMBA_CACHE_DIR`; other processes read it from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_kernels: list[tuple[Any, str]] = []


def kernel(*signatures: str) -> Callable[[Function], Function]:
    """Makes a function one that numba compiles, and keeps its types for `compile_all`.

    A kernel may call kernels of its own file only: numba looks at the time stamp of that file
    alone when it decides whether the kept code is still right.

    Args:
        signatures: argument types in numba's notation, `"(int64[::1], int64)"`, one for each
            combination that callers use. None for a function that only kernels call.
    """

    def decorate(function: Function) -> Function:
        compiled = _jit(function)
        _kernels.extend((compiled, signature) for signature in signatures)
        return cast(Function, compiled)

    return decorate


def compile_all() -> None:
    """Compiles the kernels of all modules imported so far, or reads their kept code.

    Workers that are forked inherit the result; others find it in the cache. A process that first
    compiles in the middle of training would stall its rank for seconds.
    """
    if numba.config.DISABLE_JIT:  # then kernels are plain Python
        return
    for compiled, signature in _kernels:
        compiled.compile(signature)


def _jit(function: Callable[..., Any]) -> Any:
    # error_model: a division by zero gives no branch; no kernel divides by what may be zero.
    options = {"error_model": "numpy", "nogil": True}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        # No folder for the cache can be written to. Another place that every process would
        # agree on is one where others may put code, like /tmp: better compile once more.
        logger.warning(
            "%s is compiled anew in every process (%s). Set NUMBA_CACHE_DIR to a folder of yours "
            "that can be written to.",
            function.__qualname__,
            error,
        )
        return numba.njit(**options)(function)
