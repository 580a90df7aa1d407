"""Compiling with numba: one decorator for all kernels, and when they are compiled.

numba is imported and a kernel is compiled when it is first called, or by `compile_all`, which
belongs before worker processes start: a run that packs nothing needs neither. The machine code is
kept beside the source, in `__pycache__`, or where that cannot be written to, in the user's cache
folder or `NUMBA_CACHE_DIR`; other processes read it from there.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# By file: the functions that become machine code.
_functions: defaultdict[str, list[FunctionType]] = defaultdict(list)
_kernels: list[Kernel] = []


class Kernel:
    """A function that numba compiles when it is first called.

    Attributes:
        file: module of the function.
        name: its name.
        signatures: argument types in numba's notation, one for each way in which it is called.
        is_early: whether `compile_all` compiles it.
    """

    def __init__(
        self, function: Callable[..., Any], signatures: tuple[str, ...], is_early: bool
    ) -> None:
        """Stands for `function`, which is compiled with all others of its file."""
        functools.update_wrapper(self, function)
        self.file, self.name = function.__module__, function.__name__
        self.signatures = signatures
        self.is_early = is_early
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs the compiled function."""
        return (self._dispatcher or self.dispatcher())(*arguments)

    def dispatcher(self) -> Any:
        """Returns what numba made of the function; imports numba when first called."""
        if self._dispatcher is None:
            made = _dispatchers(self.file)
            for kernel in _kernels:
                if kernel.file == self.file:
                    kernel._dispatcher = made[kernel.name]
        return self._dispatcher


def kernel(*signatures: str, is_early: bool = True) -> Callable[[Function], Function]:
    """Makes a function one that numba compiles, and keeps its types for `compile_all`.

    A kernel may only call kernels of the same file: numba looks at the time stamp of that file
    alone when it decides whether the kept code is still right.

    Args:
        signatures: argument types in numba's notation, `"(int64[::1], int64)"`, one for each
            combination that callers use. None for a function that only kernels call, which
            becomes part of their code.
        is_early: whether `compile_all` compiles it.
    """

    def decorate(function: Function) -> Function:
        _functions[function.__module__].append(cast(FunctionType, function))
        if not signatures:
            return function
        _kernels.append(Kernel(function, signatures, is_early))
        return cast(Function, _kernels[-1])

    return decorate


def compile_all() -> None:
    """Compiles the kernels of all modules imported so far, or reads their kept code.

    Workers that are forked inherit the result; others find it in the cache. A process that first
    compiles in the middle of training would stall its rank for seconds.
    """
    for kernel in _kernels:
        if kernel.is_early:
            compile_kernel(kernel)


def compile_kernel(kernel: Callable[..., Any]) -> bool:
    """Compiles one kernel; returns False if it stays Python code (`NUMBA_DISABLE_JIT`)."""
    compiled = cast(Kernel, kernel).dispatcher()
    if not hasattr(compiled, "compile"):
        return False
    for signature in cast(Kernel, kernel).signatures:
        _compile(compiled, signature)
    return True


def _compile(compiled: Any, signature: str) -> None:
    from numba.core import sigutils

    # As types, since a call looks for its code by those: by the text there would be another.
    types, _ = sigutils.normalize_signature(signature)  # type: ignore[no-untyped-call]
    try:
        compiled.compile(types)
    except OSError as error:  # no space left, for example; it is compiled all the same
        _warn_not_kept(str(error))
    except Exception:  # a corrupt file of the cache may raise anything
        logger.warning("The cached code of %s is corrupt; compiling it again.", compiled.__name__)
        compiled.recompile()
        compiled.compile(types)


def _dispatchers(module: str) -> dict[str, Any]:
    """Hands the functions of a file to numba, as copies that call each other's compiled code."""
    from numba.core import event

    class Compiling(event.Listener):
        """Logs once per process that kernels are compiled because no cached code fits."""

        def on_start(self, event: event.Event) -> None:
            if event.data["dispatcher"].py_func in copies:
                _say_compiling()

        def on_end(self, event: event.Event) -> None:
            pass

    functions = _functions[module]
    names = dict(functions[0].__globals__)
    copies = [FunctionType(f.__code__, names, f.__name__, f.__defaults__) for f in functions]
    for copy, function in zip(copies, functions, strict=True):
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        kernel = function.__globals__[function.__name__]
        names[copy.__name__] = _jit(copy, is_kept=isinstance(kernel, Kernel))
    event.register("numba:compile", Compiling())  # type: ignore[no-untyped-call]
    return names


@functools.cache
def _say_compiling() -> None:
    logger.warning(
        "Compiling code for packs or pictures. This is done once after installing, and may take a "
        "minute; later processes read the compiled code."
    )


def _jit(function: Callable[..., Any], is_kept: bool) -> Any:
    import numba

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
