"""Compiling with numba: one decorator for all kernels, and when they are compiled.

A kernel runs as plain Python until its machine code is there, or until the input is so large that
compiling it is quicker; see `compile_ahead`. Only then is numba imported. The code is kept beside
the source, in `__pycache__`, or where that cannot be written to, in the user's cache folder or
`NUMBA_CACHE_DIR`; other processes read it from there.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

from energon_lite.core.compile_ahead import CompileAhead
from energon_lite.core.errors import pass_on

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)  # for each reason, not for each kernel
_COMPILING = (
    "Compiling code for packs or pictures. This is done once after installing, and may take a "
    "minute; later processes read the compiled code."
)
_NOT_KEPT = (
    "Compiled code cannot be kept (%s), so every process compiles again, some seconds each. "
    "Set NUMBA_CACHE_DIR to a folder of yours that can be written to."
)

Function = TypeVar("Function", bound=Callable[..., Any])

# By file: the functions that become machine code.
_functions: defaultdict[str, list[FunctionType]] = defaultdict(list)
_kernels: list[Kernel] = []
# The modules with what `compile_all` compiles by default.
_early_modules: set[str] = set()
_ahead = CompileAhead(_early_modules)
# Two threads that import numba at once wait for each other, or see half of its modules.
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Kernel:
    """A function that numba compiles, which runs as plain Python until then.

    Attributes:
        function: the plain function.
        file: module of the function.
        name: its name.
        signatures: argument types in numba's notation, one for each way in which it is called.
    """

    def __init__(self, function: Callable[..., Any], signatures: tuple[str, ...]) -> None:
        """Stands for `function`, which is compiled with all others of its file."""
        functools.update_wrapper(self, function)
        self.function = function
        self.file, self.name = function.__module__, function.__name__
        self.signatures = signatures
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs the compiled function, or as long as that is missing, the plain one."""
        if self._dispatcher is None:
            if _ahead.allows_plain(arguments):
                return self._run_plain(arguments)
            self.dispatcher()
        return self._dispatcher(*arguments)

    def _run_plain(self, arguments: tuple[Any, ...]) -> Any:
        since = perf_counter()
        try:
            with np.errstate(over="ignore"):
                return self.function(*arguments)
        finally:
            _ahead.plain_sec += perf_counter() - since

    def dispatcher(self) -> Any:
        """Returns what numba made of the function; imports numba when first called."""
        if self._dispatcher is None:
            with _lock:
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
        is_early: whether `compile_all` compiles what is in this file.
    """

    def decorate(function: Function) -> Function:
        _functions[function.__module__].append(cast(FunctionType, function))
        if not signatures:
            return function
        _kernels.append(Kernel(function, signatures))
        if is_early:
            _early_modules.add(function.__module__)
        return cast(Function, _kernels[-1])

    return decorate


def prepare_kernels() -> None:
    """Reads the kept code of the kernels imported so far, or has another process compile them.

    Worker processes that are forked later inherit the one or the other.
    """
    if _ahead.begin():
        compile_all()


def fill_cache(mark: str, *modules: str) -> None:
    """Compiles the kernels of some modules and then makes the file `mark`, once on a machine."""
    with Path(f"{mark}.lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another process compiles them
        if not Path(mark).exists():
            for module in modules:
                import_module(module)
            compile_all(modules)
            Path(mark).touch()


def compile_all(modules: Collection[str] = _early_modules) -> None:
    """Compiles the kernels of modules, or reads their kept code; by default of all that pack.

    Workers that are forked inherit the result; others find it in the cache.
    """
    for kernel in _kernels:
        if kernel.file in modules:
            compile_kernel(kernel)


def compile_kernel(kernel: Callable[..., Any]) -> bool:
    """Compiles one kernel; returns False if it stays Python code (`NUMBA_DISABLE_JIT`)."""
    compiled = cast(Kernel, kernel).dispatcher()
    if not hasattr(compiled, "compile"):
        return False
    with _lock:
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
        pass_on(error)
        _warn_once(_NOT_KEPT, str(error))
    except Exception as error:  # a corrupt file of the cache may raise anything
        pass_on(error)
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
                _warn_once(_COMPILING)

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


def _jit(function: Callable[..., Any], is_kept: bool) -> Any:
    import numba

    # error_model: no branch for a division by zero; no kernel divides by what may be zero.
    try:
        return numba.njit(cache=is_kept, error_model="numpy", nogil=True)(function)
    except RuntimeError:
        # Another place that every process would agree on is one where others may put code, like
        # /tmp: better compile once more.
        _warn_once(_NOT_KEPT, "no folder for it can be written to")
        return numba.njit(error_model="numpy", nogil=True)(function)
