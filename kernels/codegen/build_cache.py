"""Keep what compilers build, each content once, in the user's cache folder: trusted as far as digests and owners go.

A file ends with the digest of its name and of what stands before it. Loaders of shared libraries and linkers read what
the file's headers name, and no further. It is written under another name, to the disk, and then renamed: processes that
build the same thing at once leave one whole file, and a file that was cut short or altered is built again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

DIGEST_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 4 << 30  # of a part; beyond, what nobody has used for the longest time goes
UNUSED_S = 3600.0  # what was used since may be about to be loaded by another process


class Kept(NamedTuple):
    """A build: its content, and the file that begins with it."""

    path: Path
    content: bytes


class BuildCache:
    """One part of the cache, a folder of files, each named by the digest of the recipe that it was built by.

    A folder that another user owns or can write to, and one that cannot be written, is done without: builds then go to
    a folder of this process's own, which ends with it, and one line on standard error says so.
    """

    def __init__(self, part: str) -> None:
        self.part = part

    def get(self, recipe: object, suffix: str, build: Callable[[], bytes]) -> Kept:
        """Return what ``recipe`` (anything JSON can write) was built to, by ``build()`` where it is not kept whole."""
        return self.find(recipe, suffix) or self.put(recipe, suffix, build())

    def find(self, recipe: object, suffix: str) -> Kept | None:
        """Return what is kept of a recipe; None where that is nothing, or not whole."""
        name, shared = _name(recipe, suffix), self.folder()
        for folder in ([shared] if shared else []) + [Path(own.name) for own in _OWN]:
            if (content := _read(folder / name)) is not None:
                return Kept(folder / name, content)
        return None

    def put(self, recipe: object, suffix: str, content: bytes) -> Kept:
        """Keep what a recipe was built to, in the place of what is there."""
        name, shared = _name(recipe, suffix), self.folder()
        if shared:
            try:
                return Kept(_write(shared / name, content), content)
            except OSError as error:
                _say(shared, f"cannot be written ({error.strerror})")
        return Kept(_write(_private() / name, content), content)

    def folder(self) -> Path | None:
        """Make the folder where it is missing; None, said once, for one that is no place to keep what will be run."""
        try:
            root = cache_folder()
            for folder in (root, root / self.part):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if unsafe := _unsafe(folder):
                    return _say(folder, unsafe)
        except OSError as error:
            return _say(root / self.part, f"cannot be made ({error.strerror})")
        except RuntimeError as homeless:
            return _say(None, str(homeless))
        return root / self.part


def digest_sources(root: Path, patterns: Iterable[str]) -> str:
    """Digest the sources of a tree that what is built follows from: by their names and content, in their order."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of cached builds: ``$XDG_CACHE_HOME/tensorir-ladder`` or ``~/.cache/tensorir-ladder``.

    A relative $XDG_CACHE_HOME is ignored, as its specification says. RuntimeError for a user without a home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "tensorir-ladder"


def _name(recipe: object, suffix: str) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest() + suffix


def _unsafe(folder: Path) -> str:
    """Say why what lies in a folder may be another user's; empty where it is not."""
    behind = folder.stat()
    if {behind.st_uid, folder.lstat().st_uid} != {os.geteuid()}:
        return "belongs to another user; set XDG_CACHE_HOME to a folder of your own"
    if behind.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by other users; chmod go-w {folder}"
    return ""


def _read(path: Path) -> bytes | None:
    """Read a whole file of this user's; None for one that is missing, another's, a link or not as it was written."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            whole = file.read()
    except OSError:
        return None
    content, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
    if digest != _digest(path.name, content):
        return None
    with suppress(OSError):  # a cache that can only be read is never swept
        os.utime(path)
    return content


def _write(path: Path, content: bytes) -> Path:
    _sweep(path.parent)
    number, partial = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(content + _digest(path.name, content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


@functools.cache  # once a process
def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left, and, of a folder that is too large, what is longest unused."""
    with suppress(FileNotFoundError):  # another process sweeps as well
        files = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(folder) if not entry.is_dir()]
        total, recent = sum(found.st_size for found, _ in files), time.time() - UNUSED_S
        for found, path in sorted(files, key=lambda file: file[0].st_mtime):
            if found.st_mtime < recent and (path.endswith(".tmp") or total > MOST_BYTES):
                os.unlink(path)
                total -= found.st_size


_OWN: list[tempfile.TemporaryDirectory[str]] = []  # of this process, once one is needed; it ends with the process


def _private() -> Path:
    if not _OWN:
        _OWN.append(tempfile.TemporaryDirectory(prefix="tensorir-ladder-"))
    return Path(_OWN[0].name)


@functools.cache
def _say(folder: Path | None, why: str) -> None:
    if multiprocessing.parent_process() is None:  # which has said it to whom it works for
        where = f"{folder} " if folder else ""
        print(f"warning: build cache {where}is not used: {where and 'it '}{why}", file=sys.stderr)
