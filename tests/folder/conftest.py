"""Most of what looks at a folder needs no trainer."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(test_checkpoint_files=FRAMEWORKS)
