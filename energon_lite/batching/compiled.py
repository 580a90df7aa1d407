"""Compiling with numba: one decorator for all kernels, and when they are compiled.

A kernel is compiled when it is first called, or by `compile_all`, which belongs before worker
processes start. The machine code is kept beside the source, in `__pycache__`, or where that cannot
be written to, in the user's cache folder or `NUMBA_CACHE_DIR`; other processes read it from there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event, sigutils

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_kernels: list[tuple[Any, str]] = []
_functions: set[Callable[..., Any]] = set()


def kernel(*signatures: str) -> Callable[[Function], Function]:
    """Makes a function one that numba compiles, and keeps its types for `compile_all`.

    A kernel may only call kernels of the same file: numba looks at the time stamp of that file
    alone when it decides whether the kept code is still right.

    Args:
        signatures: argument types in numba's notation, `"(int64[::1], int64)"`, one for each
            combination that callers use. None for a function that only kernels call, which
            becomes part of their code.
    """

    def decorate(function: Function) -> Function:
        compiled = _jit(function, is_kept=bool(signatures))
        _functions.add(function)
        _kernels.extend((compiled, signature) for signature in signatures)
        return cast(Function, compiled)

    return decorate


def compile_all() -> None:
    """Compiles the kernels of all modules imported so far, or reads their kept code.

    Workers that are forked inherit the result; others find it in the cache. A process that first
    compiles in the middle of training would stall its rank for seconds.
    """
    for compiled, signature in _kernels:
        if not hasattr(compiled, "compile"):  # with NUMBA_DISABLE_JIT, kernels are plain Python
            continue
        # As types, since a call looks for its code by those: by the text there would be another.
        types, _ = sigutils.normalize_signature(signature)  # type: ignore[no-untyped-call]
        try:
            compiled.compile(types)
        except OSError as error:  # no space left, for example; it is compiled all the same
            _warn_not_kept(str(error))
        except Exception:  # a corrupt file of the cache may raise anything
            logger.warning(
                "The cached code of %s is corrupt; compiling it again.", compiled.__name__
            )
            compiled.recompile()
            compiled.compile(types)


class _Compiling(event.Listener):
    """Logs once per process that kernels are compiled because no cached code fits."""

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func in _functions:
            _say_compiling()

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


@functools.cache
def _say_compiling() -> None:
    logger.warning(
        "Compiling the code that packs. This is done once after installing, and may take a minute; "
        "later processes read the compiled code."
    )


def _jit(function: Callable[..., Any], is_kept: bool) -> Any:
    # error_model: no branch for a division by zero; no kernel divides by what may be zero.
    try:
        return numba.njit(cache=is_kept, error_model="numpy", nogil=True)(function)
    except RuntimeError:
        # Another place that every process would agree on is one where others may put code, like
        # /tmp: better compile once more.
        _warn_not_kept("no folder for it can be written to")
        return numba.njit(error_model="numpy", nogil=True)(function)


@functools.cache  # once in a process for each reason, not once for each kernel
def _warn_not_kept(reason: str) -> None:
    logger.warning(
        "Compiled code cannot be kept (%s), so every process compiles again, some seconds each. "
        "Set NUMBA_CACHE_DIR to a folder of yours that can be written to.",
        reason,
    )
