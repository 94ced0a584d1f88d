"""The small JSON files of a folder, read in one way: bounded, strict, and field by field as a dataclass declares it.

A field is declared as bool, int, float (an int will do), str, `Literal`, `tuple[X, ...]`, `tuple[X, Y]`,
`Mapping[str, X]` or `X | None`, and as `Annotated[X, Bounds(...)]` where a number, or the length of something, has
bounds. One with a default may be absent. What is not declared is ignored. Imports neither torch nor numpy, nor
pydantic: to import that takes as long as to import all that `inspect` needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from agl_async_ckpt.exceptions import DamagedStateError, UnsupportedVersionError
from agl_async_ckpt.storage.files import read_small

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a number, or the length of something, may be."""

    least: float = 0
    most: float = math.inf

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"

    def require(self, size: float) -> None:
        """Refuse what is out of them."""
        if not self.least <= size <= self.most:
            raise _UnfitError


Count = Annotated[int, Bounds(0, 2**63 - 1)]


@dataclass(frozen=True)
class Format:
    """What a file names as its `format` and `format_version`."""

    name: str
    version: int

    def require(self, values: Mapping[str, Any], where: str) -> None:
        """Refuse a file of another format, or of another version.

        Raises:
            ValueError: It is none of this format.
            UnsupportedVersionError: It is one of another version.
        """
        version = values.get("format_version")
        if values.get("format") != self.name:
            raise ValueError("it names another format")
        if type(version) is not int or version < 1:
            raise ValueError(f"format_version must be int from 1, got {version!r:.80}")
        if version != self.version:
            raise UnsupportedVersionError(
                f"{where} is of format version {version}; this agl-async-ckpt reads version {self.version}.",
                act="Use the agl-async-ckpt that wrote it, or resume from a step that this one wrote.",
            )


def read_json(
    path: Path, cls: type[T], max_bytes: int, *, kind: Format | None = None, meaning: str = "", act: str = ""
) -> T | None:
    """Read a small JSON file; None if there is none.

    Args:
        path: Of the file.
        cls: Dataclass that declares its fields.
        max_bytes: A longer one is damaged.
        kind: What it must name itself.
        meaning: What it is for, in a sentence, for whoever has to act.
        act: What to do about a damaged one.

    Raises:
        DamagedStateError: It cannot be read, or a field is not as declared; names file and field.
        UnsupportedVersionError: It is of another version than `kind`.
    """
    try:
        return parse_json(read_small(path, max_bytes), cls, str(path), kind=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnsupportedVersionError:
        raise
    except PermissionError as error:
        act = f"{meaning} Have its owner make it readable for this user.".lstrip()
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}.", act=act) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedStateError(f"{path} cannot be read: {reason}.", act=f"{meaning} {act}".strip()) from error


def parse_json(text: str | bytes, cls: type[T], where: str, *, kind: Format | None = None) -> T:
    """Read the text of a JSON object, as `read_json` does.

    Raises:
        ValueError: It is no JSON object, or a field is not as declared; names the field.
        UnsupportedVersionError: It is of another version than `kind`.
    """
    values = parse_object(text)
    if kind is not None:
        kind.require(values, where)
    return build(cls, values)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Read the text of a JSON object in which no key stands twice and no number is out of all bounds.

    Raises:
        ValueError: It is none.
    """
    try:
        values: Any = json.loads(
            text, object_pairs_hook=_require_unique, parse_constant=_refuse_constant, parse_int=_parse_int
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if type(values) is not dict:
        raise ValueError("no JSON object")
    return cast("dict[str, Any]", values)


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass of the fields of a JSON object.

    Raises:
        ValueError: A field is missing, or not as declared; names it.
    """
    found: dict[str, Any] = {}
    for name, kind, is_needed in _declared(cls):
        if name in values:
            try:
                found[name] = _fit(values[name], kind)
            except _UnfitError:
                raise ValueError(f"{name} must be {_words(kind)}, got {str(values[name])[:80]!r}") from None
        elif is_needed:
            raise ValueError(f"{name} is missing")
    return cls(**found)


@cache
def _declared(cls: Any) -> list[tuple[str, Any, bool]]:
    """List the name and the type of each field, and whether it is needed."""
    hints = get_type_hints(cls, include_extras=True)
    return [
        (field.name, hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(cls)
    ]


class _UnfitError(Exception):
    """A value is not as declared; `build` says which."""


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _fit(value: Any, kind: Any) -> Any:
    """Return a value of JSON as one of `kind`."""
    given = cast("type[Any]", type(value))
    if kind is float and given is int:
        return float(value)
    if given is kind and (kind is not float or math.isfinite(value)):
        return value
    origin, args = _parts(kind)
    if origin is Annotated:
        found = _fit(value, args[0])
        args[1].require(found if isinstance(found, int | float) else len(found))
        return found
    if origin in (Union, UnionType):
        return _fit(value, next((arg for arg in args if arg is given), args[0]))
    if origin is tuple and given is list:
        if args[-1] is not Ellipsis and len(args) != len(value):
            raise _UnfitError
        return tuple(_fit_all(value, args[0]) if args[-1] is Ellipsis else map(_fit, value, args))
    if origin is Mapping and given is dict:
        return dict(zip(value, _fit_all([*value.values()], args[1]), strict=True))
    if origin is Literal and value in args:
        return value
    raise _UnfitError


def _fit_all(values: list[Any], kind: Any) -> Iterable[Any]:
    # Long lists of names and sizes are settled by the set of their types.
    return values if {*map(type, values)} <= {kind} != {float} else [_fit(value, kind) for value in values]


def _words(kind: Any) -> str:
    origin, args = _parts(kind)
    if origin is Annotated:
        is_size = get_origin(args[0]) in (tuple, Mapping)
        return f"{_words(args[0])}{', ' if is_size else ' '}{args[1]}{' of them' if is_size else ''}"
    if origin in (Union, UnionType, Literal):
        return " or ".join(arg if isinstance(arg, str) else _words(arg) for arg in args)
    if origin in (tuple, Mapping):
        parts = ", ".join(_words(arg) for arg in args if arg is not Ellipsis)
        return f"{'a list' if origin is tuple else 'an object'} of {parts}"
    return "null" if kind is NoneType else kind.__name__


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands twice")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _parse_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number is too long")
    return int(digits)
