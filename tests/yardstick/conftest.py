"""The trainer alone is compared with the trainer and the extension."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)
