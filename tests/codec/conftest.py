"""Values of pandas are values of prompts."""

from tests.needs import modules_need

pytest_pycollect_makemodule = modules_need(test_values=["pandas"], test_content=["pandas"])
