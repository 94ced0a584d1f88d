"""What is measured is real training."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(*FRAMEWORKS, "accelerate")
