"""The system calls of a save that touch files, and what each of them can fail with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CHANGING = (
    "openat",
    "write",
    "pwrite64",
    "writev",
    "fsync",
    "fdatasync",
    "close",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "mkdir",
    "mkdirat",
    "ftruncate",
    "truncate",
    "fallocate",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "chmod",
    "fchmod",
    "fchmodat",
    "utimensat",
    "flock",
)
"""Calls that change files or make changes durable; `open` for reading and `close` are among them for what follows."""

LOOKING = (
    "newfstatat",
    "stat",
    "lstat",
    "fstat",
    "statx",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
    "getdents64",
    "read",
    "pread64",
    "lseek",
)
"""Calls that only look."""

TRACED = (*CHANGING, *LOOKING)

_SPACE = ("ENOSPC", "EDQUOT")
_DISK = ("EIO",)
_RIGHTS = ("EACCES", "EROFS")

ERRNOS: dict[str, tuple[str, ...]] = {
    "openat": ("EMFILE", "ENFILE", "ENOMEM", "EINTR", *_RIGHTS, *_SPACE, *_DISK),
    "write": ("EINTR", "EFBIG", *_SPACE, *_DISK),
    "writev": ("EINTR", "EFBIG", *_SPACE, *_DISK),
    "pwrite64": ("EINTR", "EFBIG", *_SPACE, *_DISK),
    "fsync": ("EROFS", *_SPACE, *_DISK),
    "fdatasync": ("EROFS", *_SPACE, *_DISK),
    "close": ("EINTR", *_SPACE, *_DISK),
    "rename": ("ENOMEM", *_RIGHTS, *_SPACE, *_DISK),
    "unlink": ("ENOMEM", "EPERM", "EBUSY", *_RIGHTS, *_DISK),
    "unlinkat": ("ENOMEM", "EPERM", "EBUSY", *_RIGHTS, *_DISK),
    "rmdir": ("ENOMEM", "EBUSY", *_RIGHTS, *_DISK),
    "mkdir": ("ENOMEM", "EMLINK", *_RIGHTS, *_SPACE, *_DISK),
    "ftruncate": ("EINTR", "EFBIG", *_RIGHTS[1:], *_DISK),
    "flock": ("ENOLCK", "EINTR"),
    "newfstatat": ("EACCES", "ENOMEM", *_DISK),
    "stat": ("EACCES", "ENOMEM", *_DISK),
    "lstat": ("EACCES", "ENOMEM", *_DISK),
    "fstat": ("ENOMEM", *_DISK),
    "statx": ("EACCES", "ENOMEM", *_DISK),
    "readlink": ("EACCES", "ENOMEM", *_DISK),
    "getdents64": ("ENOMEM", *_DISK),
    "read": ("EINTR", *_DISK),
    "pread64": ("EINTR", *_DISK),
    "lseek": ("EOVERFLOW",),
}
"""Call -> the errors that its manual page and the file systems behind it know, as strace names them."""

_LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BEHIND = re.compile(r"^(\d+|AT_FDCWD)<([^>]*)>")


@dataclass(frozen=True)
class Call:
    """One call of a trace.

    Attributes:
        name: Of the system call.
        nth: It is the nth call of that name, from 1: how strace is told where to interfere.
        paths: What it is about: the file behind its descriptor, or its path arguments, absolute.
        text: The rest of its line.
    """

    name: str
    nth: int
    paths: tuple[str, ...]
    text: str

    @property
    def at(self) -> str:
        """For messages: which call, and about what."""
        return f"{self.name} #{self.nth} {' -> '.join(self.paths)}"

    @property
    def failed(self) -> bool:
        """Whether it returned an error."""
        return " = -1 E" in self.text

    @property
    def creates(self) -> bool:
        """Whether an `openat` may create its file."""
        return self.name == "openat" and "O_CREAT" in self.text

    @property
    def truncates(self) -> bool:
        """Whether an `openat` empties its file."""
        return self.name == "openat" and "O_TRUNC" in self.text


def parse_trace(text: str, inside: Path) -> list[Call]:
    """The calls of one thread about files in a folder, in order.

    Args:
        text: What `strace -y` wrote about the thread.
        inside: The folder; it counts too.
    """
    home = str(inside)
    counts: dict[str, int] = {}
    found: list[Call] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in TRACED:
            continue
        name, rest = match[1], match[2]
        counts[name] = counts.get(name, 0) + 1
        paths = tuple(path for path in _paths(name, rest) if path == home or path.startswith(f"{home}/"))
        if paths:
            found.append(Call(name, counts[name], paths, rest))
    return found


def _paths(name: str, rest: str) -> list[str]:
    behind = _BEHIND.match(rest)
    base = behind[2] if behind else ""
    if name in ("write", "pwrite64", "writev", "read", "pread64"):
        return [base]  # what is quoted is content
    quoted = [text for text in _QUOTED.findall(rest.partition(") = ")[0]) if text]
    if not quoted:
        return [base.removesuffix(" (deleted)")]
    return [text if text.startswith("/") else f"{base}/{text}" for text in quoted]
