"""TVM's tensor intrinsics without their long import."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

IMPORTING = ("importlib._bootstrap", "importlib._bootstrap_external")  # whose frames are "<frozen ...>", of no file


@contextlib.contextmanager
def import_quickly() -> Iterator[None]:
    """Let TVM's parser look at its call stack quickly inside, where modules that hold TVMScript may be imported.

    For each function that it parses, TVM asks :func:`inspect.stack` for all frames. Those of Python's own imports have
    no file, and ``inspect`` searches all of ``sys.modules`` for each of them, each time: importing
    ``tvm.s_tir.tensor_intrin`` (MetaSchedule does, and dlight where it looks for tensor cores) parses 248 functions
    under some 27 such frames, which takes a quarter of a minute, and beside torch's thousands of modules more than one.
    Inside this, ``inspect`` finds these frames' modules in the cache that it has for all others.
    """
    known = {f"<frozen {name}>": name for name in IMPORTING}
    cache: dict[str, str] = vars(inspect)["modulesbyfile"]
    added = {name: module for name, module in known.items() if name not in cache}
    cache.update(added)
    try:
        yield
    finally:
        for name in added:
            cache.pop(name, None)
