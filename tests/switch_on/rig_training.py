"""Named in VERL_USE_EXTERNAL_MODULES of the workers: trains in a real task runner as the rig does without Ray.

Trainer, loader, agl-server, saves and loads are real; worker groups and model servers are the rig's stand-ins. Each
life leaves a record beside the output folder; the first one stays at `STAYS_AT` until it is killed.
"""

from __future__ import annotations

import itertools
import time
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from tests.switch_on.names import STAYING, STAYS_AT, record_of

STAYS_S = 600.0


def _extend(module: ModuleType) -> None:
    from tests.rig.life import RecordingMixin, Rig
    from tests.rig.record import Recorder

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        out = Path(kwargs["config"].trainer.default_local_dir)
        number = next(number for number in itertools.count(1) if not record_of(out, number).exists())
        recorder = Recorder(record_of(out, number))
        recorder.emit("begun")

        def stay(point: str, step: int) -> bool:
            if number == 1 and (point, step) == STAYS_AT:
                (out / STAYING).touch()
                time.sleep(STAYS_S)
            return False

        self.rig = Rig(recorder, stay)
        super(cls, self).__init__(*args, **kwargs)

    namespace = {"__init__": init, "init_workers": lambda self: None}
    base: Any = vars(module)["AgentLightningRayPPOTrainer"]
    cls: Any = types.new_class(base.__name__, (RecordingMixin, base), {}, lambda names: names.update(namespace))
    vars(module)["AgentLightningRayPPOTrainer"] = cls


wrapt.register_post_import_hook(_extend, "agentlightning.verl.trainer")
