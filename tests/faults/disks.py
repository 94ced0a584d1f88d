"""Small file systems of our own: on a loop device, whose power can be cut, and in memory, which can be full.

All of it happens in a child process with mounts of its own (a private mount namespace): however the child ends, the
kernel unmounts and detaches everything with it, and no other process ever sees the mounts.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.children import run_child

FILE_SYSTEMS = {
    "ext4": (48, ["mkfs.ext4", "-q", "-F"]),
    "xfs": (320, ["mkfs.xfs", "-q", "-f"]),  # it refuses to be smaller
}
"""Name -> size in MiB (sparse), and how to make one."""

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
CUTS = {"log flushed": 1, "nothing flushed": 2}
"""What reaches the disk when the power goes: what was synced and the journal, or only what was synced."""


def why_no_mounts(file_system: str, folder: Path) -> str | None:
    """The reason why such a file system cannot be mounted here, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if file_system in FILE_SYSTEMS and shutil.which(FILE_SYSTEMS[file_system][1][0]) is None:
        return f"{FILE_SYSTEMS[file_system][1][0]} is not installed"

    def attempt() -> None:
        enter_private_mounts()
        folder.mkdir(parents=True, exist_ok=True)
        if file_system == "tmpfs":
            mount_tmpfs(folder, 1 << 20)
            return
        disk = Disk(file_system, folder.with_suffix(".image"), folder)
        disk.mount()
        disk.cut_power("nothing flushed")
        disk.unmount()

    ended = run_child(attempt)
    return None if ended.returned else f"{file_system} cannot be mounted or shut down here: {ended.error}"


def with_private_mounts(action: Callable[[], Any]) -> Any:
    """Run `action` in a child with mounts of its own; its result.

    Raises:
        AssertionError: It raised; the text is its error.
    """

    def act() -> Any:
        enter_private_mounts()
        return action()

    ended = run_child(act, patience_s=280)
    assert ended.returned, ended.error or "killed"
    return ended.value


def enter_private_mounts() -> None:
    """From here on this process, and its children, mount for themselves alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "mount --make-rprivate /")


def mount_tmpfs(folder: Path, num_bytes: int) -> None:
    """Mount an empty file system in memory that holds `num_bytes`."""
    _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder))


class Disk:
    """A file system in an image file.

    Args:
        file_system: Of `FILE_SYSTEMS`.
        image: Created; sparse.
        folder: Where it is mounted; what lies there otherwise is hidden meanwhile.
    """

    def __init__(self, file_system: str, image: Path, folder: Path) -> None:
        self._image = image
        self._folder = folder
        size, command = FILE_SYSTEMS[file_system]
        with image.open("wb") as file:
            file.truncate(size << 20)
        _run(*command, str(image))

    def mount(self) -> None:
        """Mount it; after a power cut this replays the journal."""
        _run("mount", "-o", "loop", str(self._image), str(self._folder))

    def unmount(self) -> None:
        """Unmount it; whatever is not on the disk yet is written, unless its power was cut."""
        _run("umount", str(self._folder))

    def sync(self) -> None:
        """Make everything on it durable."""
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                raise OSError(ctypes.get_errno(), "syncfs")
        finally:
            os.close(fd)

    def cut_power(self, cut: str) -> None:
        """From now on nothing reaches the disk; what was not durable is lost.

        Args:
            cut: Of `CUTS`.
        """
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", CUTS[cut]))
        finally:
            os.close(fd)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
