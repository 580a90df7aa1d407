"""Compiling with numba: one decorator for all kernels, which are compiled when first called.

Only then is numba imported. The code is kept beside the source, in `__pycache__`, or where that
cannot be written to, in the user's cache folder or `NUMBA_CACHE_DIR`; other processes read it from
there. Of several processes that lack it one compiles, and the others wait.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

from energon_lite.core.errors import Ignored, pass_on

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)  # for each reason, not for each kernel
_COMPILING = "Compiling code for packs, once on this machine; it may take a minute."
_NOT_KEPT = (
    "Compiled code cannot be kept (%s), so every process compiles again, some seconds each. "
    "Set NUMBA_CACHE_DIR to a folder of yours that can be written to."
)

Function = TypeVar("Function", bound=Callable[..., Any])

# By file: the functions that become machine code, and those of them that are called from outside.
_functions: defaultdict[str, list[FunctionType]] = defaultdict(list)
_kernels: defaultdict[str, list[Kernel]] = defaultdict(list)
# Two threads that import numba at once wait for each other, or see half of its modules.
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Kernel:
    """A function that numba compiles when it is first called.

    Attributes:
        function: the plain function.
        signatures: argument types in numba's notation, one for each way in which it is called.
        compiled: what numba made of it; None before the first call.
    """

    def __init__(self, function: Callable[..., Any], signatures: tuple[str, ...]) -> None:
        """Stands for `function`, which is compiled with all others of its file."""
        functools.update_wrapper(self, function)
        self.function, self.signatures = function, signatures
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs the compiled function."""
        if self.compiled is None:
            _compile_file(self.function.__module__)
        return self.compiled(*arguments)


def kernel(*signatures: str) -> Callable[[Function], Function]:
    """Makes a function one that numba compiles.

    A kernel may only call kernels of the same file: numba looks at the time stamp of that file
    alone when it decides whether the kept code is still right.

    Args:
        signatures: argument types in numba's notation, `"(int64[::1], int64)"`, one for each
            combination that callers use. None for a function that only kernels call, which
            becomes part of their code.
    """

    def decorate(function: Function) -> Function:
        _functions[function.__module__].append(cast(FunctionType, function))
        if not signatures:
            return function
        made = Kernel(function, signatures)
        _kernels[function.__module__].append(made)
        return cast(Function, made)

    return decorate


def compile_all() -> None:
    """Compiles the kernels that were imported so far, or reads their kept code.

    Workers that are forked inherit the result; others find it in the cache.
    """
    for file in [*_kernels]:
        _compile_file(file)


def _compile_file(file: str) -> None:
    with _lock:
        kernels = _kernels[file]
        if kernels[0].compiled is not None:
            return
        made = _dispatchers(file)
        compiled = [made[kernel.function.__name__] for kernel in kernels]
        if hasattr(compiled[0], "compile"):  # else it stays Python (`NUMBA_DISABLE_JIT`)
            with _one_process(compiled[0].stats.cache_path):
                for dispatcher, kernel in zip(compiled, kernels, strict=True):
                    for signature in kernel.signatures:
                        _compile(dispatcher, signature)
        for dispatcher, kernel in zip(compiled, kernels, strict=True):
            kernel.compiled = dispatcher


@contextmanager
def _one_process(folder: str | None) -> Iterator[None]:
    """Keeps other processes of the machine from compiling meanwhile, where a lock can be had."""
    with ExitStack() as stack:
        if folder is not None:
            with Ignored(OSError):
                lock = stack.enter_context((Path(folder) / "energon_lite.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiled: Any, signature: str) -> None:
    from numba.core import sigutils

    # Types, since a call looks for its code by those: by the text there would be another.
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
