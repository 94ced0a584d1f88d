"""The judgement of a step: one reading of its input state, and a link that leads nowhere is no missing file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.folder.judgement import judge_step
from agl_async_ckpt.storage import container
from agl_async_ckpt.storage.layout import FILE_NAME, RUN_FILE_NAME, SEAL_NAME
from tests.folder.made import run_folder


def test_the_input_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the seal are the bytes that were decoded."""
    step_dir = run_folder(tmp_path / "out") / "global_step_4"
    opened: list[Any] = []
    open_regular = container.open_regular
    monkeypatch.setattr(container, "open_regular", lambda path: opened.append(path) or open_regular(path))
    judgement = judge_step(step_dir)
    assert judgement.refusal is None
    assert judgement.state is not None
    assert [path for path in opened if Path(path).name == FILE_NAME] == [step_dir / FILE_NAME]


@pytest.mark.parametrize("target", ["nowhere", FILE_NAME])
@pytest.mark.parametrize("is_on_record", [True, False])
def test_a_link_that_leads_nowhere_is_refused(target: str, is_on_record: bool, tmp_path: Path) -> None:
    """Or to itself: taken for a step that was saved without the extension, its inputs would be skipped."""
    out = run_folder(tmp_path / "out")
    step_dir = out / "global_step_4"
    (step_dir / FILE_NAME).unlink()
    (step_dir / FILE_NAME).symlink_to(target)
    if not is_on_record:
        (out / RUN_FILE_NAME).unlink()
        (step_dir / SEAL_NAME).unlink()
    refusal = judge_step(step_dir).refusal
    assert isinstance(refusal, DamagedStateError)
    assert str(step_dir / FILE_NAME) in refusal.fact
    assert str(out / "global_step_6") in refusal.act
