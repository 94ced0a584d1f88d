"""A tiny inference server: an OpenAI chat endpoint over transformers on CPU, as a Ray actor that takes new weights.

It answers what agent-lightning trains from: `prompt_token_ids`, `token_ids` and the log-probability of each token.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer


class ChatServer:
    """Holds its own copy of the policy and serves `POST /v1/chat/completions` on a free loopback port."""

    def __init__(self, model_path: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._lock = threading.Lock()
        self._num_requests = 0
        end = self._tokenizer.eos_token_id
        # Special tokens other than the end of the turn are no text. A space at the edge of an answer does not survive
        # decoding and encoding, and the next turn would no longer start with the tokens of this one.
        self._forbidden = [i for i in self._tokenizer.all_special_ids if i != end]
        self._forbidden.append(self._tokenizer.convert_tokens_to_ids(" "))

        app = FastAPI()
        app.post("/v1/chat/completions")(self._chat)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._port: int = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True).start()

    def address(self) -> str:
        """`host:port` of the endpoint."""
        return f"127.0.0.1:{self._port}"

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace the policy; a request in progress finishes first."""
        with self._lock:
            # The output layer is tied to the embedding and may be absent.
            self._model.load_state_dict(weights, strict=False)

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        with self._lock:
            self._num_requests += 1
            number = self._num_requests
            tokens, log_probs = self._sample(
                prompt, float(body.get("temperature") or 1.0), int(body.get("max_tokens") or 8)
            )
        return {
            "id": f"chat-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model"),
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {
                        "role": "assistant",
                        "content": self._tokenizer.decode(tokens, skip_special_tokens=True),
                    },
                    "token_ids": tokens,
                    "logprobs": {
                        "content": [
                            {"token": str(token), "logprob": log_prob}
                            for token, log_prob in zip(tokens, log_probs, strict=True)
                        ]
                    },
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens),
                "total_tokens": len(prompt) + len(tokens),
            },
        }

    @torch.no_grad()
    def _sample(self, prompt: list[int], temperature: float, max_tokens: int) -> tuple[list[int], list[float]]:
        """Sample at least one and at most `max_tokens` tokens; the end of the turn is included if it was sampled."""
        end = self._tokenizer.eos_token_id
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] != end):
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, -1] / temperature
            logits[self._forbidden] = -1e9
            if not tokens:
                logits[end] = -1e9  # an empty answer is nothing to train on
            distribution = torch.log_softmax(logits, dim=-1)
            token = int(torch.multinomial(distribution.exp(), num_samples=1))
            tokens.append(token)
            log_probs.append(float(distribution[token]))
        return tokens, log_probs

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """What VERL asks of a GPU server between rollout and training has no meaning here: no memory is shared."""

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing
