"""A small Ray cluster that lives until its standard input closes; prints its address.

python -m tests.switch_on.cluster TEMP_DIR
"""

from __future__ import annotations

import sys


def main() -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        _temp_dir=sys.argv[1],
        log_to_driver=False,
    )
    sys.stdout.write(ray.get_runtime_context().gcs_address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
