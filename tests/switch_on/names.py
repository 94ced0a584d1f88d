"""What driver side and observer agree on. Apart from `observer`, whose import takes the trainer class over."""

from __future__ import annotations

RECORD = "observed.json"
ASK_A_WORKER = "ask_a_worker"
"""As `trainer.experiment_name`: note the policy losses of another worker process too."""
GO = "go"
