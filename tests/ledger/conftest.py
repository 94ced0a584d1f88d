"""Most of what reads a ledger needs no trainer."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(test_runs=FRAMEWORKS)
