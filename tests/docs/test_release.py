"""What a release says of itself, in every place where it says it."""

from __future__ import annotations

import re

import yaml

from agl_async_ckpt import __version__
from tests.docs.pages import ROOT

RELEASES = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_changelog_begins_with_what_is_unreleased_and_dates_every_release() -> None:
    """Newest first, this version at the top."""
    (unreleased, no_date), *released = RELEASES
    assert (unreleased, no_date) == ("Unreleased", "")
    assert released[0][0] == __version__
    assert all(date for _, date in released)
    versions = [tuple(map(int, version.split("."))) for version, _ in released]
    assert versions == sorted(versions, reverse=True)
    assert [date for _, date in released] == sorted((date for _, date in released), reverse=True)


def test_citation_is_of_this_version() -> None:
    """With the date of the changelog, and the keys without which it is not valid."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["date-released"]) == RELEASES[1]
