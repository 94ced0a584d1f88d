"""Prompts 0 to 7, rollout batch 2, generation batch 4; killed after the first step. What is trained next?

python -m tests.openrlhf.reference_scene             with the extension: [2, 3]
python -m tests.openrlhf.reference_scene --stock     without it: [4, 5]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.openrlhf.rig.stage import Stage


def play(stage: Stage, folder: Path, *, extended: bool) -> list[int]:
    """Return the first batch that the resumed run trains."""
    args = stage.args(folder, 8, rollout__batch_size=2, rollout__vllm_generate_batch_size=4)
    killed = stage.live(args, crash_at=2, extended=extended, in_order=True)
    assert killed.prompts == ["0", "1"]
    return [int(prompt) for prompt in stage.live(args, extended=extended, in_order=True).trained[0]]


if __name__ == "__main__":
    import tests.openrlhf.conftest  # noqa: F401 - paths of the stand-ins
    from tests.openrlhf.rig.stage import Stage

    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        sys.stdout.write(f"{play(stage, Path(folder) / 'ckpt', extended='--stock' not in sys.argv)}\n")
        stage.close()
