"""The one client of the agl-server: agent-lightning's, whose requests wait for an answer and do nothing twice.

Most requests of a trainer may be repeated. Two have an effect that a repetition would double; once an earlier try may
have been processed, both ask the server first:

- Rollouts are created under ids chosen here. If the server knows the ids, it was this server that has processed the
  first try, and repeating it returns what exists. If not, it may be a new one, whose controller has seen the ids of the
  old: they are created under other ids.
- Events have no id. One that is there more often than expected was posted by the earlier try.

| an answer | tells |
|---|---|
| to any GET | that this trainer was there at its `Date` |
| to a creation of rollouts | since when this life creates them |
| to a GET of the gateway's state | how many requests are left; a judge may call it drained |
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx
import wrapt
from httpx_retries import Retry

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.carry_over import REPLACES_KEY, InFlight
from agl_async_ckpt.agl.in_flight.patience import PASSING_STATUS, PassingAnswer, Patience


class ServerClient(wrapt.ObjectProxy):
    """A client of a trainer, or of one of its rollout managers."""

    def __init__(
        self,
        wrapped: Any,
        patience: Patience,
        in_flight: InFlight,
        on_created: Callable[[httpx.Response], None] = lambda response: None,
        on_answer: Callable[[str | None], None] = lambda date_header: None,
        accepts_drain: Callable[[int], bool] = lambda num_requests: False,
    ) -> None:
        """Wrap a client.

        Args:
            wrapped: agent-lightning's.
            patience: How long it waits; of the trainer.
            in_flight: Notes and tags the rollouts that are created, and knows their events.
            on_created: Called with the answer to each creation of rollouts.
            on_answer: Called with the `Date` header of each answer to `get`.
            accepts_drain: Called with the number of requests in the gateway, when its state is asked for; whether none
                is to be reported, because a drain waits for that without an end.
        """
        super().__init__(wrapped)
        self._self_patience = patience
        self._self_in_flight = in_flight
        self._self_on_created = on_created
        self._self_on_answer = on_answer
        self._self_models: dict[str, Any] | None = None
        self._self_accepts_drain = accepts_drain

    def request(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        """Send a request that may be repeated, until it is answered.

        Raises:
            ServerError: No answer within the time to wait.
        """
        if (method, url) == ("DELETE", internals.MODELS_URL):
            self._self_models = None  # models that are deleted are not registered again
        return self._send(method, url, lambda: None, **kwargs)

    def get(self, url: str, **kwargs: Any) -> httpx.Response:
        """Get as the wrapped client does, without its own retries; the gateway's state as judged."""
        response = self.request("GET", url, **kwargs)
        self._self_on_answer(response.headers.get("date"))
        if url != internals.GATEWAY_STATE_URL or not response.is_success:
            return response
        state = response.json()
        if not self._self_accepts_drain(int(state.get(internals.NUM_PROXIED, 0))):
            return response
        return httpx.Response(200, json={**state, internals.NUM_PROXIED: 0}, request=response.request)

    def delete(self, url: str, **kwargs: Any) -> httpx.Response:
        """Delete as the wrapped client does; it may be repeated."""
        return self.request("DELETE", url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post as the wrapped client does; an event once."""
        if internals.posts_event(url):
            return self._send("POST", url, partial(self._find_posted, url, kwargs["json"]), **kwargs)
        return self.request("POST", url, **kwargs)

    def post_with_retry(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post; models and rollouts are noted.

        Rollouts that had to be created under other ids have those in the posted requests afterwards.

        Raises:
            httpx.HTTPStatusError: The server refuses it; asking again would not help.
        """
        if url == internals.ROLLOUTS_URL:
            return self._create(**kwargs)
        response = self.post(url, **kwargs).raise_for_status()
        if url == internals.MODELS_URL:
            self._self_models = kwargs
        return response

    def register_again(self) -> None:
        """Register the models that are registered by this client: the server may be a new one."""
        if self._self_models is not None:
            self.post_with_retry(internals.MODELS_URL, **self._self_models)

    def _create(self, json: list[dict[str, Any]], **kwargs: Any) -> httpx.Response:
        tagged = self._self_in_flight.outgoing(json)
        response = self._send("POST", internals.ROLLOUTS_URL, partial(self._choose_ids, tagged), json=tagged, **kwargs)
        response.raise_for_status()
        for request, posted in zip(json, tagged, strict=True):
            request["rollout_id"] = posted["rollout_id"]
        self._self_on_created(response)
        return response

    def _send(
        self, method: str, url: str, avoid_doubling: Callable[[], httpx.Response | None], **kwargs: Any
    ) -> httpx.Response:
        """Send until there is an answer.

        Args:
            method: Of HTTP.
            url: Below the server's.
            avoid_doubling: Called before another try, when an earlier one may have been processed. It returns the
                answer that was lost, or has the next try double nothing.
            kwargs: As httpx takes them.

        Raises:
            ServerError: No answer within the time to wait.
        """

        def attempt(again: bool, maybe_processed: bool) -> httpx.Response:
            if again:
                self._register_before_another_try(url)
            return (avoid_doubling() if maybe_processed else None) or self._send_once(method, url, **kwargs)

        return self._self_patience.send(self.base_url, internals.subject_of(str(url)), attempt)

    def _register_before_another_try(self, url: str) -> None:
        # The server may be a new one, and an agent that finds no model fails: before anything is created.
        if self._self_models is not None and url != internals.MODELS_URL:
            self._send_once("POST", internals.MODELS_URL, **self._self_models).raise_for_status()

    def _choose_ids(self, requests: list[dict[str, Any]]) -> None:
        """Have rollouts created under other ids, unless the server holds the first: a request creates all or none."""
        response = self._send_once("GET", f"{internals.ROLLOUTS_URL}/{requests[0]['rollout_id']}")
        if response.status_code != 404:
            response.raise_for_status()
            return
        for request in requests:
            old_id, new_id = request["rollout_id"], uuid.uuid4().hex
            self._self_in_flight.rename(old_id, new_id)
            request["metadata"].setdefault(REPLACES_KEY, old_id)
            request["rollout_id"] = new_id

    def _find_posted(self, url: str, body: dict[str, Any]) -> httpx.Response | None:
        """Return the answer that an earlier try would have brought; None if the server does not hold its event."""
        rollout_id = internals.rollout_of(url) or ""
        response = self._send_once("GET", f"{internals.ROLLOUTS_URL}/{rollout_id}/events")
        if response.status_code != 200:
            return None

        def is_equal(event: Mapping[str, Any]) -> bool:
            return event["event_type"] == body["event_type"] and event["data"] == body["data"]

        found = [event for event in response.json() if is_equal(event)]
        known = self._self_in_flight.known_events(rollout_id)
        if len(found) <= sum(map(is_equal, known)):
            return None
        return httpx.Response(200, json=found[-1], request=response.request)

    def _send_once(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        """Send once, past the retries of the transport.

        Raises:
            httpx.TransportError, PassingAnswer: The server may answer another time.
        """
        if self._self_patience.answer_s is not None:
            kwargs["timeout"] = self._self_patience.answer_s
        response = self.__wrapped__.request(method, url, extensions={"retry": Retry(total=0)}, **kwargs)
        if response.status_code in PASSING_STATUS or self._is_passing_404(str(url), response):
            raise PassingAnswer(response)
        return response

    def _is_passing_404(self, url: str, response: httpx.Response) -> bool:
        """Tell whether "not found" was said by something before a server that has gone; else the address is wrong.

        The server misses nothing but rollouts, and names them in the detail of a JSON answer. An error page may name
        the whole URL, too.
        """
        if response.status_code != 404:
            return False
        rollout_id = internals.rollout_of(url)
        if rollout_id is None:
            return self._self_patience.has_answered
        try:
            return rollout_id not in str(response.json()["detail"])
        except (ValueError, TypeError, KeyError):
            return True
