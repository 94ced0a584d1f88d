"""Values of pandas are values of prompts."""

from tests.needs import modules_need

pytest_pycollect_makemodule = modules_need(test_codec=["pandas"], test_content=["pandas"])
