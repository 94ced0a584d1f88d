"""The rig runs the real trainer."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)
