"""Which steps of an output folder belong to the training that goes on there. Pure functions.

A start that goes back to an earlier step, or begins anew, leaves the later steps on disk: they are of a branch that was
abandoned. So such a start begins a branch with a number of its own. The run file names the branches that the present
training came through, and every saved step names those of the life that saved it.

A `Branch` lists them as (number, from): the steps after `from`, up to the next entry's, are of branch `number`. Where
nothing is on record it is branch 0; so a folder that was never gone back in has an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping

from agl_async_ckpt.storage.trailer import MAX_BRANCH_ENTRIES, Branch


def left_at(branch: Branch, step: int, own: Branch) -> int | None:
    """Return the step from which a branch left a saved step behind; None if the step is of it.

    Args:
        branch: Of the training.
        step: Number of the saved step.
        own: What the saved step names.
    """
    number, start = _at(branch, step)
    return None if number == _at(own, step)[0] else start


def begin_branch(on_record: Branch, base: Branch | None, origin: int, existing: Mapping[int, Branch]) -> Branch:
    """Return the branch of a life that begins.

    Args:
        on_record: Of the folder until now.
        base: What the step names that it begins at; None if it begins from scratch or from another folder.
        origin: Number of the step that it begins at, wherever that is; 0 from scratch.
        existing: The steps of the folder that could be resumed from, and what they name.
    """
    if base is None:
        left = list(existing)
    else:
        left = [step for step, own in existing.items() if step > origin and left_at(base, step, own) is None]
    if not left:
        return base or ()
    number = 1 + max((number for branch in (on_record, *existing.values()) for number, _ in branch), default=0)
    # A life from another folder is not the owner of the steps below its origin either.
    new = ((number, origin),) if base is not None or origin == 0 else ((number, 0), (number, origin))
    return (*(base or ()), *new)[-MAX_BRANCH_ENTRIES:]


def _at(branch: Branch, step: int) -> tuple[int, int]:
    return next(((number, start) for number, start in reversed(branch) if start < step), (0, 0))
