"""A life in a process of its own, to be killed at any instant: `python -m tests.rig.child <json>`, or by a nursery.

The JSON object holds `settings` (of `RunSettings`), `out_dir`, `base_url`, `record` (path of the event log, appended
to line by line) and, optionally, `stock` (true: without the extension), `stop_at`: `[point, step]`, at which the
child stops and waits, so that its killer can hit that instant, `passed`: path of a FIFO that gets a line for each
point that is passed, and `stop_signals`: names of signals at which it stops gently, as a driver in `run_ppo` does. The
server and the agents live in the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl.stop.signals import StopSignals
from agl_async_ckpt.exceptions import EXIT_STOPPED
from agl_async_ckpt.folder.stop_request import request_stop
from tests.rig.record import Life, Recorder
from tests.rig.settings import RunSettings


def live(request: dict[str, Any]) -> None:
    """Run the life that `request` describes, to its end."""
    from tests.rig.life import run_life, stock_trainer

    stop_at = tuple(request.get("stop_at") or ())
    passed = os.open(request["passed"], os.O_WRONLY) if "passed" in request else None

    def here(point: str, step: int) -> bool:
        if passed is not None:
            os.write(passed, f"{point} {step}\n".encode())
        if (point, step) == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return False

    run_life(
        RunSettings.from_json(json.dumps(request["settings"])),
        request["out_dir"],
        request["base_url"],
        trainer_cls=stock_trainer() if request.get("stock") else None,
        die_at=here,
        recorder=Recorder(Path(request["record"])),
    )


def main(argument: str) -> int:
    """Run the life that `argument` describes; 0 if `fit` returned, the exit code of a stop if it was asked to stop."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    request = json.loads(argument)
    out_dir = Path(request["out_dir"])
    with StopSignals(
        request.get("stop_signals") or (), lambda asked: request_stop(out_dir, asked.by) and None, grace_s=120
    ):
        live(request)
    stopped = Life.from_file(Path(request["record"])).stopped
    return 0 if stopped is None else EXIT_STOPPED


class ChildLife:
    """Handle of a running child, for the parent. Use as a context: whatever happens, nothing is left running.

    Args:
        settings: The run.
        out_dir: The output folder.
        base_url: Of the parent's server.
        record: The event log; must not exist yet.
        stock: Without the extension.
        stop_at: Point and step at which the child stops itself with SIGSTOP.
        stop_signals: Names of signals at which it saves and stops.
        env: Added to the environment.
    """

    def __init__(
        self,
        settings: RunSettings,
        out_dir: Path,
        base_url: str,
        record: Path,
        *,
        stock: bool = False,
        stop_at: tuple[str, int] | None = None,
        stop_signals: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.record = record
        request = {
            "settings": json.loads(settings.to_json()),
            "out_dir": str(out_dir),
            "base_url": base_url,
            "record": str(record),
            "stock": stock,
            "stop_at": stop_at,
            "stop_signals": stop_signals,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rig.child", json.dumps(request)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Loader workers die with it: they are killed by their group.
            start_new_session=True,
        )

    def __enter__(self) -> ChildLife:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def wait(self, timeout_s: float = 120) -> Life:
        """Wait for its end by itself.

        Raises:
            AssertionError: It ended with an error; the text is what it wrote to stderr.
        """
        _, error = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, error
        return self.life()

    def wait_stopped(self, timeout_s: float = 120) -> None:
        """Wait until it has stopped itself at `stop_at`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return
            assert not pid, f"the child ended with status {status} before it reached its stop"
            time.sleep(0.02)
        raise TimeoutError("the child did not reach its stop")

    def kill(self) -> Life:
        """SIGKILL the child and its loader workers; what it recorded until then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.life()

    def life(self) -> Life:
        """What it has recorded so far."""
        return Life.from_file(self.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
