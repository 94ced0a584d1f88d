"""Sections of a trainer's config: OmegaConf's, with its flags and interpolations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(section: Any, **values: Any) -> Iterator[None]:
    """Override values of a config section while the body runs, and put them back however it ends.

    A key that is not there is added, and removed again. A section that takes no new keys, or no changes, does so for
    these alone. An interpolation is put back as one.
    """
    from omegaconf import OmegaConf, flag_override

    content = OmegaConf.to_container(section, resolve=False)
    assert isinstance(content, dict), "a section is a mapping"
    with flag_override(section, ["struct", "readonly"], False):
        section.update(values)
    try:
        yield
    finally:
        with flag_override(section, ["struct", "readonly"], False):
            for key in values:
                if key in content:
                    section[key] = content[key]
                else:
                    section.pop(key, None)
