"""The state of a training boundary, as it travels through Ray's queue with the batch that ends there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYOUT = 1
"""How the parts of an OpenRLHF state lie in an `InputState`."""


@dataclass(frozen=True)
class Boundary:
    """What the generator holds right after it has handed out a batch. Light: samples are behind a reference.

    Attributes:
        tail: Ray object of generated samples, or None. Shared by every boundary of one generation.
        num_samples: How many of the last samples in `tail` are still to be trained.
        exhausted: The loader has handed out the last prompt of the episode.
        must_match: Settings and data without which the state does not fit.
        must_match_tail: Those that matter only while there are samples in the tail.
        recorded: For messages.
    """

    tail: Any
    num_samples: int
    exhausted: bool
    must_match: Mapping[str, Any]
    must_match_tail: Mapping[str, Any]
    recorded: Mapping[str, Any]

    def fetch_tail(self) -> list[Any]:
        """Fetch the samples that are still to be trained; oldest first."""
        import ray

        return list(ray.get(self.tail))[-self.num_samples :] if self.num_samples else []


class TailShelf:
    """Puts each generated tail into Ray's object store once; what remains of it later is a reference and a length."""

    def __init__(self) -> None:
        self._samples: list[Any] = []
        self._reference: Any = None

    def place(self, samples: Sequence[Any]) -> Any:
        """Return a reference to a list whose last `len(samples)` items are `samples`; None for no samples."""
        if not samples:
            self._samples, self._reference = [], None
        elif not self._ends_with(samples):
            import ray

            self._samples = list(samples)
            self._reference = ray.put(self._samples)
        return self._reference

    def _ends_with(self, samples: Sequence[Any]) -> bool:
        kept = self._samples[-len(samples) :]
        return len(kept) == len(samples) and all(one is other for one, other in zip(kept, samples, strict=True))
