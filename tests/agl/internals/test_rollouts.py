"""Classes of a framework with a mixin of the extension before them."""

from __future__ import annotations

from typing import Any

from agl_async_ckpt.agl import internals


class Manager:
    """Stands for a rollout manager."""


class Mixin:
    """Stands for an extension of it."""

    mark: Any


def test_a_class_that_is_extended_gets_what_is_new_alone() -> None:
    """A trainer of one's own may make a manager of the class that it was given at an earlier step."""
    first: Any = internals.with_mixin(Manager, Mixin, mark=1)
    second: Any = internals.with_mixin(first, Mixin, mark=2)
    assert (first.mark, second.mark) == (1, 2)
    assert issubclass(second, Mixin)
    assert [cls.__name__ for cls in second.__mro__[:2]] == ["Manager", "Manager"]
