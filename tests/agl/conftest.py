"""The part for agent-lightning on VERL needs both."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)
