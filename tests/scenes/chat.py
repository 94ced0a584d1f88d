"""The policy: a tiny chat server that answers what agent-lightning trains from. Tokens are random: each is unique.

In a thread of the trainer it dies with the trainer; `python -m tests.scenes.chat` is a host of its own, which can be
stopped with SIGSTOP: its socket then accepts requests and never answers, like a host that has vanished.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_OFFSET = 10
"""Token id of a prompt is this plus the row id: a trained batch tells which rows it holds."""
RESPONSE_LENGTH = 4
FIRST_TOKEN, LAST_TOKEN = 1000, 30000


def completion(body: dict[str, Any], life: str, rng: random.Random) -> dict[str, Any]:
    """Answer a chat request `question <row>`; `model` tells which life answered."""
    row = int(body["messages"][-1]["content"].split()[-1])
    tokens = [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(RESPONSE_LENGTH)]
    # Log-probs that float32 holds exactly.
    log_probs = [-rng.randint(1, 2**16) / 2**14 for _ in tokens]
    return {
        "model": life,
        "prompt_token_ids": [PROMPT_OFFSET + row] * 2,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "answer"},
                "token_ids": tokens,
                "logprobs": {"content": [{"logprob": log_prob} for log_prob in log_probs]},
            }
        ],
    }


class ChatServer(ThreadingHTTPServer):
    """Serves `POST /v1/chat/completions` on a free loopback port."""

    daemon_threads = True

    def __init__(self, life: str) -> None:
        rng = random.Random()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(completion(body, life, rng)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.server_address[1]}"

    def serve_in_thread(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self.serve_forever, name="chat", daemon=True).start()


def main() -> None:
    """Tell the address on stdout, then serve."""
    server = ChatServer("host")
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
