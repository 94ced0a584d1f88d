"""Branches as pure functions, and what a malformed one is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_async_ckpt.folder.branch import begin_branch, left_at
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.storage.small_json import parse_json
from agl_async_ckpt.storage.trailer import MAX_BRANCH_ENTRIES, Branch


def read(value: Any) -> Branch:
    """The branch of a run file."""
    return parse_json(json.dumps({"run_id": "run-1", "branch": value}), RunIdentity, "run file").branch


def test_going_on_begins_no_branch() -> None:
    """Nothing is above the step; what is of another branch already need not be left again."""
    assert begin_branch((), (), 6, {4: (), 6: ()}) == ()
    assert begin_branch(((1, 2),), ((1, 2),), 3, {3: ((1, 2),), 6: ()}) == ((1, 2),)


def test_going_back_leaves_what_is_above() -> None:
    """Until it is saved again."""
    branch = begin_branch((), (), 2, dict.fromkeys(range(1, 7), ()))
    assert branch == ((1, 2),)
    assert [left_at(branch, step, ()) for step in (1, 2, 3, 6)] == [None, None, 2, 2]
    assert left_at(branch, 3, branch) is None


def test_beginning_anew_leaves_everything() -> None:
    """From scratch, and from another folder, whose step 5 is no step of this one."""
    assert begin_branch((), None, 0, {}) == ()
    anew = begin_branch((), None, 0, {1: (), 2: ()})
    fork = begin_branch((), None, 5, {3: (), 6: ()})
    assert [left_at(anew, step, ()) for step in (1, 2)] == [0, 0]
    assert [left_at(fork, step, ()) for step in (3, 6)] == [0, 5]


def test_a_number_is_never_given_twice() -> None:
    """Neither that of the folder, nor that of a step on disk."""
    assert begin_branch(((7, 2),), (), 1, {2: ()}) == ((8, 1),)
    assert begin_branch((), (), 1, {2: (), 4: ((9, 3),)}) == ((10, 1),)


def test_a_list_that_grows_too_long_loses_its_oldest_entries() -> None:
    """A reader refuses longer ones."""
    branch: Branch = tuple((number, number) for number in range(1, MAX_BRANCH_ENTRIES + 1))
    longer = begin_branch(
        branch, branch, MAX_BRANCH_ENTRIES + 1, {MAX_BRANCH_ENTRIES + 1: branch, MAX_BRANCH_ENTRIES + 2: branch}
    )
    assert longer == (*branch[1:], (MAX_BRANCH_ENTRIES + 1, MAX_BRANCH_ENTRIES + 1))
    assert read(longer) == longer


@pytest.mark.parametrize(
    "value", [None, {}, "ab", [1], [[1]], [[1, 2, 3]], [[1, "2"]], [[True, 1]], [[-1, 2]], [[1, 2**63]], [[1, 2]] * 257]
)
def test_what_is_no_branch_is_refused(value: Any) -> None:
    """By a ValueError, which makes a file damaged."""
    with pytest.raises(ValueError, match="branch must be"):
        read(value)
