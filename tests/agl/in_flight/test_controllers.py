"""Contract with the controllers: an id that one has seen is never run again; "never an old id" rests on it.

The played agents of the rig promise to act alike (`test_rig.py`); here the real reconcilers are asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.rig.server import AglServer

JOB_TEMPLATE = """
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: any
"""


@asynccontextmanager
async def client_of(server: AglServer) -> AsyncIterator[Any]:
    """agent-lightning's asynchronous client of the real server."""
    from agentlightning.client import AgentLightningAsyncClient

    async with AgentLightningAsyncClient(base_url=server.url, verify=False) as client:
        yield client


async def post(client: Any, rollout_id: str, **config: Any) -> None:
    """Create a rollout under an id of our choice."""
    body = {"rollout_id": rollout_id, "input": {"index": 0}, "config": config}
    (await client.post("/api/rollouts", json=[body])).raise_for_status()


async def state_of(client: Any, rollout_id: str) -> str:
    """Lifecycle state."""
    return (await client.get(f"/api/rollouts/{rollout_id}")).json()["rollout"]["status"]["state"]


def test_local_controller_never_starts_an_id_twice(server: AglServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old id, deleted and created again, succeeds at once: no agent runs, no event comes. A new id is started."""
    from agentlightning.controller import local_reconciler

    started: list[Any] = []
    spawn = asyncio.create_subprocess_exec

    async def spawn_nothing(*command: str, env: dict[str, str], **options: Any) -> Any:
        started.append(env["AGL_EVENT_URL"].split("/")[-4])
        return await spawn(sys.executable, "-S", "-c", "", **options)

    monkeypatch.setattr(local_reconciler.asyncio, "create_subprocess_exec", spawn_nothing)
    config = OmegaConf.create(
        {
            "runner_type": "local",
            "agl_server": {"url": server.url, "key": ""},
            "local_runner": {"maximum_size": 4, "poll_interval": 1},
        }
    )

    async def scene() -> None:
        async with client_of(server) as client:
            reconciler = local_reconciler.LocalReconciler(client, config)
            agent = {"local": {"agent_class": "any:Agent"}}
            await post(client, "old", **agent)
            await reconciler._reconcile_once()
            assert await state_of(client, "old") == "running"
            await reconciler._rid_to_proc["old"].proc.wait()
            await reconciler._reconcile_once()
            assert await state_of(client, "old") == "succeeded"

            (await client.delete("/api/rollouts/old")).raise_for_status()
            await post(client, "old", **agent)
            await post(client, "new", **agent)
            await reconciler._reconcile_once()
            assert await state_of(client, "old") == "succeeded"
            assert (await client.get("/api/rollouts/old/events")).json() == []
            assert await state_of(client, "new") == "running"
            await reconciler._rid_to_proc["new"].proc.wait()

    asyncio.run(scene())
    assert started == ["old", "new"]


def test_kubernetes_job_name_is_made_of_the_id(server: AglServer) -> None:
    """The same id has the same job for ever, whatever else the rollout holds; a new id has another."""
    pytest.importorskip("kr8s")
    from agentlightning.controller.k8s_reconciler import build_job_name, build_job_spec
    from agentlightning.schemas import Rollout

    config = OmegaConf.create(
        {
            "k8s_runner": {"namespace": "default", "ttl_after_finished": 1200},
            "agl_server": {"url": "http://s", "agent_url": None, "key": ""},
        }
    )

    def name(rollout_id: str, index: int) -> str:
        record = {
            "rollout_id": rollout_id,
            "input": {"index": index},
            "config": {"k8s": {"job_template": JOB_TEMPLATE}},
            "status": {"created_at": index, "updated_at": index},
        }
        return build_job_spec(Rollout.model_validate(record), config)["metadata"]["name"]

    assert name("a", 1) == name("a", 2) == build_job_name("a")
    assert name("b", 1) == build_job_name("b") != build_job_name("a")


def test_kubernetes_controller_takes_an_old_ids_job_for_the_new_rollouts(
    server: AglServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished job of an old id ends the rollout that was created again; only a new id gets a job."""
    pytest.importorskip("kr8s")
    from agentlightning.controller import k8s_reconciler

    condition = {"type": "Complete", "status": "True"}
    left = SimpleNamespace(
        raw={
            "metadata": {"name": k8s_reconciler.build_job_name("old"), "labels": {}},
            "status": {"conditions": [condition]},
        }
    )
    created: list[str] = []

    class Job:
        def __init__(self, manifest: dict[str, Any], api: Any) -> None:
            self.name = manifest["metadata"]["name"]

        async def async_create(self) -> None:
            created.append(self.name)

        @staticmethod
        async def async_list(**query: Any) -> AsyncIterator[Any]:
            yield left

    monkeypatch.setattr(k8s_reconciler, "k8s_objects", SimpleNamespace(Job=Job))
    config = OmegaConf.create(
        {
            "k8s_runner": {
                "namespace": "default",
                "ttl_after_finished": 1200,
                "max_jobs_per_minute": 100,
                "poll_interval": 5,
            },
            "agl_server": {"url": server.url, "agent_url": None, "key": ""},
        }
    )

    async def scene() -> None:
        async with client_of(server) as client:
            reconciler = k8s_reconciler.K8sReconciler(client, config)
            reconciler._k8s_api = object()
            for rollout_id in ("old", "new"):
                await post(client, rollout_id, k8s={"job_template": JOB_TEMPLATE})
            await reconciler._reconcile_once()
            assert await state_of(client, "old") == "succeeded"
            assert (await client.get("/api/rollouts/old/events")).json() == []
            assert await state_of(client, "new") == "queuing"

    asyncio.run(scene())
    assert created == [k8s_reconciler.build_job_name("new")]
