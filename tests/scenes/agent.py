"""The agent of the scenes: a process that agl-controller starts per rollout and that does what the plan says.

Moves of a plan, each a string:

    ask             one chat completion; tries again while the gateway is paused or the model is missing
    ask-once:S      one try, for S seconds; fails if there is no answer, also if the gateway is paused
    ask-swallow:S   one try, for S seconds; an error is swallowed, and the reward will be 0
    reward          post a reward: k/64, so that bfloat16 holds it exactly; 0 after a swallowed error
    gate:NAME       wait until the gate is open
    exit:CODE       end at once
    later:NAME      leave a process behind that posts the reward once the gate is open
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

POLL_S = 0.02
ASK_TIMEOUT_S = 600.0
"""The gateway itself tries a dead model for 13 s, and one that vanished for half an hour."""
GIVE_UP_AFTER_S = 60.0
"""How long `ask` puts up with a paused gateway or a missing model."""


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line; a single write, so that many processes may do it at once."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (json.dumps(record) + "\n").encode())
    finally:
        os.close(fd)


def call(url: str, body: dict[str, Any], *, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    """POST JSON, return JSON."""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['AGL_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        return json.load(response)


class SceneAgent:
    """One rollout. The controller's worker imports this class and calls `run`."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["SCENE_DIR"])
        self._input = json.loads(os.environ["SCENE_INPUT"])
        self._events_url = os.environ["AGL_EVENT_URL"]
        self._rollout_id = self._events_url.split("/rollouts/")[1].split("/")[0]
        self._row = int(self._input["index"])
        mode = os.environ["AGL_OPENAI_BASE_URL"].split("/mode/")[1].split("/")[0]
        self._who = str(self._row) if mode == "train" else mode
        self._number = self._claim_number()
        self._swallowed = False

    def run(self) -> None:
        """Follow the plan."""
        threading.Thread(target=self._end_with_scene, daemon=True).start()
        self._log("start", input=self._input, env=os.environ.get("SCENE_EXTRA"))
        for move in self._moves():
            name, _, argument = move.partition(":")
            {
                "ask": self._ask,
                "ask-once": self._ask_once,
                "ask-swallow": self._ask_swallow,
                "reward": self._reward,
                "gate": self._gate,
                "exit": self._exit,
                "later": self._later,
            }[name](*filter(None, [argument]))
        self._log("end")

    def _claim_number(self) -> int:
        """How many agents of this row were started before: 0 for the first."""
        number = 0
        while True:
            try:
                (self._folder / "claims" / f"{self._who}-{number}").touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return number

    def _moves(self) -> list[str]:
        plan = json.loads((self._folder / "plan.json").read_text())
        starts = plan.get(self._who) or plan["default"]
        return starts[min(self._number, len(starts) - 1)]

    def _log(self, event: str, **data: Any) -> None:
        append_line(
            self._folder / "agents.jsonl",
            {
                "event": event,
                "rollout_id": self._rollout_id,
                "row": self._row,
                "who": self._who,
                "number": self._number,
                "pid": os.getpid(),
                **data,
            },
        )

    def _end_with_scene(self) -> None:
        """Nobody may be left behind, not even an agent that hangs in a request and has lost its controller."""
        while not (self._folder / "over").exists() and self._folder.exists():
            time.sleep(0.1)
        os._exit(9)

    def _ask_once(self, timeout_s: str = str(ASK_TIMEOUT_S)) -> None:
        self._log("ask")
        url = f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions"
        messages = [{"role": "user", "content": f"question {self._row}"}]
        answer = call(url, {"model": "any", "messages": messages}, timeout_s=float(timeout_s))
        choice = answer["choices"][0]
        self._log(
            "answer",
            tokens=choice["token_ids"],
            log_probs=[token["logprob"] for token in choice["logprobs"]["content"]],
            life=answer["model"],
        )

    def _ask(self) -> None:
        deadline = time.monotonic() + GIVE_UP_AFTER_S
        while True:
            try:
                return self._ask_once()
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (429, 502, 503) or time.monotonic() > deadline:
                        self._log("refused", status=error.code)
                        raise
                time.sleep(0.1)

    def _ask_swallow(self, timeout_s: str = str(ASK_TIMEOUT_S)) -> None:
        try:
            self._ask_once(timeout_s)
        except OSError as error:
            self._swallowed = True
            self._log("swallowed", error=str(error))

    def _reward(self, value: str | None = None) -> None:
        reward = 0.0 if self._swallowed else float(value) if value else random.randint(1, 63) / 64
        self._log("reward", value=reward)
        call(self._events_url, {"event_type": "reward", "data": {"value": reward}})

    def _gate(self, name: str) -> None:
        self._log("at gate", gate=name)
        gate = self._folder / "gates" / name
        while not gate.exists():
            time.sleep(POLL_S)

    def _exit(self, code: str) -> None:
        self._log("end", code=int(code))
        os._exit(int(code))

    def _later(self, gate: str) -> None:
        reward = random.randint(1, 63) / 64
        code = f"from tests.scenes.agent import post_later; post_later({gate!r}, {self._rollout_id!r}, {reward!r})"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def post_later(gate: str, rollout_id: str, reward: float) -> None:
    """Of the process that an agent leaves behind: wait, then post a reward under the rollout's id."""
    folder = Path(os.environ["SCENE_DIR"])
    while not (folder / "gates" / gate).exists():
        if (folder / "over").exists() or not folder.exists():
            return
        time.sleep(POLL_S)
    status = 200
    try:
        call(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": reward}})
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    append_line(
        folder / "agents.jsonl",
        {"event": "late reward", "rollout_id": rollout_id, "value": reward, "status": status, "pid": os.getpid()},
    )
