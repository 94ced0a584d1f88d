"""The rollout manager's client: rollouts that it creates are noted and tagged, and each answer proves life.

Two requests have an effect that a repetition would double. Both ask the server first, once an earlier try may have been
processed:

- Rollouts are created under ids chosen here. If the server knows the ids, it was this server that has processed the
  first try, and repeating it returns what exists. If not, it may be a new one, whose controller has seen the ids of the
  old: they are created under other ids.
- Events have no id. One that is there more often than expected was posted by the earlier try.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.carry_over import REPLACES_KEY
from agl_async_ckpt.agl.in_flight.keeper import RolloutKeeper
from agl_async_ckpt.agl.in_flight.patience import PatientClient

MODELS_URL = "/api/models"
EVENTS_URL = re.compile(r"(/api/rollouts/([^/]+))/attempt/[^/]+/events")


class TaggingClient(PatientClient):
    """The client of one rollout manager."""

    def __init__(self, wrapped: Any, keeper: RolloutKeeper) -> None:
        super().__init__(wrapped, keeper.patience)
        self._self_keeper = keeper
        self._self_models: dict[str, Any] | None = None

    def get(self, url: str, **kwargs: Any) -> httpx.Response:
        """Get; an answer proves life."""
        response = super().get(url, **kwargs)
        self._self_keeper.on_answer(response.headers.get("date"))
        return response

    def delete(self, url: str, **kwargs: Any) -> httpx.Response:
        """Delete; models that are deleted are not registered again."""
        if url == MODELS_URL:
            self._self_models = None
        return super().delete(url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post; an event once."""
        event_url = EVENTS_URL.fullmatch(url)
        if event_url is None:
            return super().post(url, **kwargs)

        def attempt(again: bool, maybe_processed: bool) -> httpx.Response:
            if again:
                self._before_another_try(url)
            done = self._posted_before(event_url[1], event_url[2], kwargs["json"]) if maybe_processed else None
            return done or self._once("POST", url, **kwargs)

        return self._patiently(url, attempt)

    def post_with_retry(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post; models and rollouts are noted.

        Rollouts that had to be created under other ids have those in the posted requests afterwards.
        """
        if url == internals.ROLLOUTS_URL:
            response = self._create(kwargs.pop("json"), **kwargs).raise_for_status()
            self._self_keeper.on_created(response)
            return response
        response = super().post_with_retry(url, **kwargs)
        if url == MODELS_URL:
            self._self_models = kwargs
        return response

    def register_again(self) -> None:
        """Register the models that are registered by this client: the server may be a new one."""
        if self._self_models is not None:
            super().post_with_retry(MODELS_URL, **self._self_models)

    def _before_another_try(self, url: str) -> None:
        # Before anything is created: an agent that finds no model fails.
        if self._self_models is not None and url != MODELS_URL:
            self._once("POST", MODELS_URL, **self._self_models).raise_for_status()

    def _create(self, requests: list[dict[str, Any]], **kwargs: Any) -> httpx.Response:
        tagged = self._self_keeper.groups.outgoing(requests)

        def attempt(again: bool, maybe_processed: bool) -> httpx.Response:
            if again:
                self._before_another_try(internals.ROLLOUTS_URL)
            if maybe_processed and not self._knows(tagged[0]["rollout_id"]):
                self._rename(requests, tagged)
            return self._once("POST", internals.ROLLOUTS_URL, json=tagged, **kwargs)

        return self._patiently(internals.ROLLOUTS_URL, attempt)

    def _knows(self, rollout_id: str) -> bool:
        """Whether the server holds the first of some rollouts; it creates those of one request at once."""
        response = self._once("GET", f"{internals.ROLLOUTS_URL}/{rollout_id}")
        return response.status_code != 404 and bool(response.raise_for_status())

    def _rename(self, requests: list[dict[str, Any]], tagged: list[dict[str, Any]]) -> None:
        for request, posted in zip(requests, tagged, strict=True):
            old_id, new_id = posted["rollout_id"], uuid.uuid4().hex
            self._self_keeper.groups.rename(old_id, new_id)
            posted["metadata"].setdefault(REPLACES_KEY, old_id)
            request["rollout_id"] = posted["rollout_id"] = new_id

    def _posted_before(self, rollout_url: str, rollout_id: str, body: dict[str, Any]) -> httpx.Response | None:
        """Return the answer that an earlier try would have brought; None if the server does not hold its event."""
        response = self._once("GET", f"{rollout_url}/events")
        if response.status_code != 200:
            return None

        def is_equal(event: Mapping[str, Any]) -> bool:
            return event["event_type"] == body["event_type"] and event["data"] == body["data"]

        found = [event for event in response.json() if is_equal(event)]
        known = self._self_keeper.groups.known_events(rollout_id)
        if len(found) <= sum(map(is_equal, known)):
            return None
        return httpx.Response(200, json=found[-1], request=response.request)
