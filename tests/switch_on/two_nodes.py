"""A Ray cluster of two nodes on this machine, until its standard input closes: the driver's, and the one with CPUs.

python -m tests.switch_on.two_nodes

A line with the ids of the nodes is printed at the start. A line on the standard input has the second node killed, with
all its processes at once, and is answered when another one has come in its place.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import psutil

ATTEMPTS = 3
"""Ray's own time limits for a start are short for a busy machine."""
LOSS_S = 120.0
"""Longest time for Ray to notice that a node has gone."""


def add_node(cluster: Any, **arguments: Any) -> Any:
    return cluster.add_node(include_dashboard=False, object_store_memory=100 * 1024**2, **arguments)


def start() -> tuple[Any, Any]:
    """Return the cluster and its second node; the task runner, which needs a CPU, can be there alone."""
    from ray.cluster_utils import Cluster

    for attempt in range(ATTEMPTS):
        cluster = Cluster()
        try:
            add_node(cluster, num_cpus=0)
            return cluster, add_node(cluster, num_cpus=4)
        except Exception:
            cluster.shutdown()
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def kill(cluster: Any, node: Any) -> None:
    """What a machine that goes leaves of a node: nothing, and nobody has been told."""
    raylets = [info.process.pid for info in node.all_processes["raylet"]]
    found = [psutil.Process(pid) for pid in raylets]
    for process in [*found, *(child for raylet in found for child in raylet.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)


def print_nodes(cluster: Any, second: Any) -> None:
    nodes = {"address": cluster.address, "driver": cluster.head_node.node_id, "runner": second.node_id}
    sys.stdout.write(json.dumps(nodes) + "\n")
    sys.stdout.flush()


def main() -> None:
    cluster, second = start()
    print_nodes(cluster, second)
    for _ in sys.stdin:
        kill(cluster, second)
        second = add_node(cluster, num_cpus=4)
        # Until Ray has noticed the loss, it may give the next task runner to the node that is gone.
        cluster.wait_for_nodes(timeout=LOSS_S)
        print_nodes(cluster, second)
    cluster.shutdown()


if __name__ == "__main__":
    main()
