"""Keep what was built by what it was made for, and find it without making, lowering and compiling it again.

A build follows from what it was made for, from the versions of TVM and of the compiler, and from this project's
sources: of all these it is kept, one file a build (:mod:`.build_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import tvm
import tvm_ffi

from tensorir_ladder.kernels.codegen.build_cache import BuildCache, digest_sources
from tensorir_ladder.kernels.codegen.toolchain import Compiler

Build = TypeVar("Build")


class Sources:
    """The sources under ``root`` that builds follow from, as this process loaded them."""

    def __init__(self, root: Path, patterns: Iterable[str]) -> None:
        self.root, self.patterns = root, tuple(patterns)
        self.loaded = digest_sources(root, self.patterns)

    def are_as_loaded(self) -> bool:
        """Tell whether nobody edited them since; else what this process builds may follow from both."""
        return digest_sources(self.root, self.patterns) == self.loaded


@dataclass(frozen=True)
class KeptBuilds(Generic[Build]):
    """Builds of a kind, kept in a part of the cache as ``write`` makes bytes of them, which ``read`` reads.

    ``read`` raises ValueError for what is no such build.
    """

    cache: BuildCache
    suffix: str
    sources: Sources
    write: Callable[[Build], bytes]
    read: Callable[[bytes], Build]

    def get(self, made_for: Iterable[object], compiler: Compiler, make: Callable[[], Build]) -> Build:
        """Return the build that is kept, or else what ``make()`` builds, which then is kept.

        Nothing is kept or found where sources were edited since this process loaded them. Raises what ``make`` raises.
        """
        recipe = self.recipe(made_for, compiler)
        recent = self.sources.are_as_loaded()
        found = self._find(recipe) if recent else None
        if found is None:
            found = make()
            if recent:
                self.cache.put(recipe, self.suffix, self.write(found))
        return found

    def find(self, made_for: Iterable[object], compiler: Compiler) -> Build | None:
        """Return the build that is kept; None where there is none, or none that can be read."""
        return self._find(self.recipe(made_for, compiler))

    def recipe(self, made_for: Iterable[object], compiler: Compiler) -> str:
        """Write down all that a build follows from: what JSON has no form for as its text."""
        versions = tvm.__version__, tvm_ffi.__version__, compiler.version, self.sources.loaded
        return msgspec.json.encode([*made_for, *versions], enc_hook=str).decode()

    def _find(self, recipe: str) -> Build | None:
        kept = self.cache.find(recipe, self.suffix)
        if kept is None:
            return None
        try:
            return self.read(kept.content)
        except ValueError:
            return None
