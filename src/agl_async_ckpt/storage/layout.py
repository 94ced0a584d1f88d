"""Names on disk. A leaf: imports nothing of the package.

<output folder>/
  latest_checkpointed_iteration.txt   tracker: the step that an automatic resume takes (VERL)
  agentlightning_run.json             which run this folder belongs to, and its latest life (this package)
  agentlightning_lock.json            held by the trainer that writes here (this package)
  agentlightning_alive.json           when trainers of this run were there (this package)
  agentlightning_ledger.jsonl         which inputs each step pulled and trained (this package)
  agentlightning_stop.json            asks the trainer to stop; only until it has (this package, or anybody)
  global_step_<N>/
    agentlightning_input.pt           input state (this package)
    agentlightning_seal.json          proof that the save finished (this package)
    data.pt                           loader state (VERL)
    actor/, critic/                   models (VERL)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FILE_NAME = "agentlightning_input.pt"
SEAL_NAME = "agentlightning_seal.json"
LOADER_FILE_NAME = "data.pt"
RUN_FILE_NAME = "agentlightning_run.json"
LOCK_FILE_NAME = "agentlightning_lock.json"
ALIVE_FILE_NAME = "agentlightning_alive.json"
LEDGER_NAME = "agentlightning_ledger.jsonl"
STOP_NAME = "agentlightning_stop.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
MODEL_FOLDERS = ("actor", "critic")

_STEP_NAME = re.compile(r"global_step_(0|[1-9][0-9]*)")


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"global_step_{step}"


def parse_step(path: str | os.PathLike[str]) -> int | None:
    """Return the step in a folder's name, which may end in a slash; None if that is not `global_step_<N>`."""
    found = _STEP_NAME.fullmatch(Path(path).name)
    return int(found[1]) if found else None
