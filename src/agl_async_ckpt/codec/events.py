"""The events of a rollout that has ended, kept as compressed JSON.

Long lists of token ids and log-probabilities take a thirteenth of the memory so, are written by a save as they are,
and are read only when the trainer asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, overload

from pydantic_core import to_json

from agl_async_ckpt.codec.arrays import Lender, pack_bytes, unpack_bytes
from agl_async_ckpt.codec.decode import Plain
from agl_async_ckpt.codec.format import MAX_DEPTH
from agl_async_ckpt.codec.packed_json import compress, decompress
from agl_async_ckpt.exceptions import DamagedStateError, UnencodableValueError

Event = Mapping[str, Any]


class PackedEvents(Sequence[Event]):
    """A list or tuple of events. Never changes; each look at an event unpacks all of them.

    Attributes:
        num_bytes: Size as JSON.
        event_types: The `event_type` of the events that have one.
    """

    __slots__ = ("_data", "_is_tuple", "_later", "_size", "event_types", "num_bytes")

    def __init__(
        self, data: bytes, size: int, is_tuple: bool, event_types: frozenset[str], later: tuple[Event, ...] = ()
    ) -> None:
        """Take over what `pack` or `decode_events` made; `later` are events that came after."""
        self._data, self._size, self._is_tuple, self._later = data, size, is_tuple, later
        self.event_types = event_types
        self.num_bytes = size + sum(len(_dumps(event)) + 1 for event in later)

    @classmethod
    def pack(cls, events: Sequence[Event], where: str = "events") -> PackedEvents:
        """Pack events.

        Args:
            events: List or tuple of JSON objects.
            where: Their place, for the error.

        Raises:
            UnencodableValueError: Something that JSON would carry as something else.
        """
        if isinstance(events, PackedEvents):
            return events
        _require_json(events, where, 0)
        return cls.take(events)

    @classmethod
    def take(cls, events: Sequence[Event]) -> PackedEvents:
        """Pack a list or tuple of events that are JSON for certain, as pydantic makes them in its mode "json"."""
        data, size = compress(_dumps(events))
        return cls(data, size, isinstance(events, tuple), _types(events))

    def with_event(self, event: Event) -> PackedEvents:
        """Return these events and one more; quick, for a reward is posted for every rollout."""
        types = self.event_types | _types((event,))
        return PackedEvents(self._data, self._size, self._is_tuple, types, (*self._later, event))

    def unpack(self) -> list[Event] | tuple[Event, ...]:
        """Return the events, of the kind that was packed.

        Raises:
            DamagedStateError: They come from a file whose checksum is right, and are no events.
        """
        events = [*_loads(decompress(self._data, self._size)), *self._later]
        return tuple(events) if self._is_tuple else events

    def encode(self, lender: Lender | None = None) -> dict[str, Plain]:
        """Return plain values for a payload; with a lender, large ones show the memory of these events."""
        if self._later:
            return PackedEvents.pack(self.unpack()).encode(lender)
        data, types = pack_bytes(self._data, lender), sorted(self.event_types)
        return {"tuple": self._is_tuple, "size": self._size, "zlib": data, "types": types}

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        """Return one event or several."""
        return self.unpack()[index]

    def __iter__(self) -> Iterator[Event]:
        """Yield the events, in order."""
        return iter(self.unpack())

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.unpack())

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` holds equal events, packed or as a list or tuple like these."""
        return self.unpack() == (other.unpack() if isinstance(other, PackedEvents) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as of a list

    def __repr__(self) -> str:
        """Show the events."""
        return f"PackedEvents({self.unpack()!r})"


def decode_events(plain: Plain) -> PackedEvents:
    """Take over what `PackedEvents.encode` returned. Its text is unpacked and not read: that takes five times as long.

    Raises:
        ValueError, TypeError, KeyError, zlib.error: It is something else.
    """
    data, size = unpack_bytes(plain["zlib"]), plain["size"]
    decompress(data, size)
    types = frozenset(str(kind) for kind in cast("list[Any]", plain["types"]))
    return PackedEvents(data, size, bool(plain["tuple"]), types)


def _dumps(events: Any) -> bytes:
    try:
        return to_json(events, inf_nan_mode="constants")  # exact, in a sixth of the time of `json.dumps`
    except (ValueError, UnicodeError):  # half a surrogate pair
        return json.dumps(events, separators=(",", ":")).encode()


def _loads(text: str) -> list[Event]:
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedStateError(f"The events of a rollout cannot be decoded: {error}.") from error
    if type(events) is not list:
        raise DamagedStateError("The events of a rollout cannot be decoded: they are no list.")
    return cast("list[Event]", events)


def _types(events: Sequence[Any]) -> frozenset[str]:
    kinds = (event.get("event_type") for event in events if isinstance(event, Mapping))  # pyright: ignore
    return frozenset(kind for kind in kinds if type(kind) is str)


def _require_json(value: Any, where: str, depth: int) -> None:
    """Refuse what JSON would carry as something else: tuples, keys that are not text, subclasses."""
    if depth > MAX_DEPTH:
        raise UnencodableValueError(f"{where}: nested more than {MAX_DEPTH} deep.")
    items: Any = value
    if type(value) is dict:
        mapping = cast("dict[Any, Any]", value)
        if any(type(key) is not str for key in mapping):
            raise UnencodableValueError(f"{where}: a key that is no text cannot be saved as JSON.")
        items = mapping.values()
    elif type(value) is not list and not (depth == 0 and type(value) is tuple):
        raise UnencodableValueError(f"{where}: {type(value).__name__} cannot be saved as JSON.")
    # A list of token ids or log-probabilities is settled by the set of its types.
    if not {*map(type, items)} <= {str, int, float, bool, type(None)}:
        for item in items:
            if type(item) not in (str, int, float, bool, type(None)):
                _require_json(item, where, depth + 1)
