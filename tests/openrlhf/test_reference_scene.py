"""The scene that shows the fault, and that it is gone."""

from __future__ import annotations

from pathlib import Path

from tests.openrlhf.reference_scene import play
from tests.openrlhf.rig.stage import Stage


def test_resume_trains_the_generated_samples_first(stage: Stage, tmp_path: Path) -> None:
    """Prompts 2 and 3 had been generated and not trained."""
    assert play(stage, tmp_path, extended=True) == [2, 3]


def test_openrlhf_alone_skips_them(stage: Stage, tmp_path: Path) -> None:
    """So the scene is one in which the extension makes the difference."""
    assert play(stage, tmp_path, extended=False) == [4, 5]


def test_resume_does_not_generate_again_what_it_has(stage: Stage, tmp_path: Path) -> None:
    """Tokens of the tail come from the checkpoint."""
    args = stage.args(tmp_path, 8)
    stage.live(args, crash_at=2, in_order=True)
    assert stage.live(args, in_order=True).generated == ["4", "5", "6", "7"]
