"""Durable publication of files: temp file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from agl_async_ckpt.exceptions import StateWriteError
from agl_async_ckpt.storage.layout import TRACKER_NAME, parse_step

log = logging.getLogger(__name__)

_NAME = re.compile(rf"agentlightning_[a-z]+\.[a-z]+|{re.escape(TRACKER_NAME)}")
_TEMP_NAME = re.compile(rf"\.({_NAME.pattern})\.[0-9]+\.[0-9a-f]{{8}}\.tmp")
# Some network file systems cannot sync a folder and say so; nothing can be done there, and the entry is theirs to keep.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})


def publish(target: Path, write: Callable[[int], None], before_rename: Callable[[], None] | None = None) -> None:
    """Replace `target` so that a reader finds the old file or the new one, never a part.

    If `target` is a symbolic link, the file it points to is replaced, in that file's folder, and the link stays. The
    mode is what the umask leaves of 0666. fsync is called once: after a failure the kernel may report success for
    data that is gone.

    Args:
        target: File in an existing folder.
        write: Writes the content to a descriptor.
        before_rename: Called once the new content is durable and not yet visible.

    Raises:
        OSError: `target` is the old file; or, if only the last fsync failed, of unknown durability.
    """
    real = Path(os.path.realpath(target))
    temp = real.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    fd: int | None = None
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        write(fd)
        os.fsync(fd)
        closing, fd = fd, None  # after a failed close the number may already be another file's
        os.close(closing)
        if before_rename is not None:
            before_rename()
        temp.rename(real)
    except BaseException:
        if fd is not None:
            _quietly(lambda: os.close(fd))
        _quietly(temp.unlink)
        raise
    sync_folder(real.parent)


def sync_file(path: Path) -> None:
    """fsync a file that another library wrote."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """fsync a folder: per fsync(2), syncing a file does not make its directory entry durable."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_folders(path: Path) -> None:
    """Create a folder and its parents, durably: each parent that gained an entry is synced."""
    missing: list[Path] = []
    folder = path
    while not folder.exists():
        if folder.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(folder))
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`: one call moves at most 2 GiB, and may move less."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.EIO, "write moved no byte")
        view = view[written:]


def begin_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Have the kernel begin to move written bytes to the disk, so that the fsync at the end finds little left.

    Linux starts the write-back of a range that is declared as not needed. An error of it is reported by the fsync.
    """
    with contextlib.suppress(OSError):  # advice: a file system may not take it
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def write_error(target: Path, error: Exception) -> StateWriteError:
    """Say what was not published, and keep the error number."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return StateWriteError(
        f"{target} was not published: {reason}{f' (errno {number})' if number else ''}.",
        act="Free space or fix the folder, then save again; nothing was selected for a resume by this attempt.",
        errno=number,
    )


def unwritable(folder: Path, error: OSError) -> StateWriteError:
    """Say at a start that the output folder cannot be written, or which file in it, and keep the error number."""
    file = Path(str(error.filename))
    # That a temp file cannot be made says nothing of the file, but of the folder.
    inside = error.filename is not None and file.parent == folder and not _TEMP_NAME.fullmatch(file.name)
    reason, what = (f"{file.name}: {error.strerror}", f"{file.name} in ") if inside else (error.strerror, "")
    return StateWriteError(
        f"The output folder {folder} cannot be written ({reason}).",
        act=f"Nothing was trained. Make {what}trainer.default_local_dir writable, or set another one.",
        errno=error.errno,
    )


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Open a file for reading, without waiting for anybody: a FIFO in its place must not block a start.

    Returns:
        Its descriptor, to be closed, and its size in bytes.

    Raises:
        OSError: It cannot be opened, or is no regular file.
        ValueError: No file can have that name.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd, info.st_size


def read_small(path: Path, max_bytes: int) -> bytes:
    """Read a whole small file.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is longer than `max_bytes`.
    """
    fd, size = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        data = file.read(min(size, max_bytes) + 1)  # a bound alone would be allocated
    if len(data) > max_bytes:
        raise ValueError(f"longer than {max_bytes} bytes")
    return data


def remove_files(folder: Path, names: tuple[str, ...]) -> None:
    """Remove files of a folder, where they exist, and make that durable."""
    removed = False
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
            removed = True
    if removed:
        sync_folder(folder)


def leftover_temps(folder: str | os.PathLike[str]) -> list[Path]:
    """Find the temp files of writers in an output folder and its steps, or in one step folder.

    Looks as well where links of the published names lead. What a living writer has open is among them. A folder that
    may not be looked into, another user's, is passed over.

    Raises:
        OSError: A folder cannot be read for another reason.
    """
    home = Path(folder)
    if not home.is_dir():
        return []
    places = {home, *(path for path in _entries(home) if parse_step(path) is not None and path.is_dir())}
    links = [link for place in places for link in _entries(place) if _NAME.fullmatch(link.name) and link.is_symlink()]
    places |= {Path(os.path.realpath(link)).parent for link in links}
    return [
        path
        for place in sorted(place for place in places if place.is_dir())
        for path in sorted(_entries(place))
        if _TEMP_NAME.fullmatch(path.name) and path.is_file()
    ]


def remove_leftover_temps(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove the temp files that killed writers left. Call it only while no other process writes there.

    Returns:
        The removed files, as `leftover_temps` finds them; of one that cannot be removed a warning has to do.

    Raises:
        OSError: A folder cannot be read.
    """
    removed: list[Path] = []
    for path in leftover_temps(folder):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s, left behind by a writer that was killed, cannot be removed: %s.", path, error.strerror)
        else:
            removed.append(path)
    return removed


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except PermissionError:
        return []


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _quietly(act: Callable[[], None]) -> None:
    """Clean up without hiding the error that made it necessary."""
    with contextlib.suppress(OSError):
        act()
