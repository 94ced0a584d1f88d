"""Two pages are tried with real training."""

from tests.needs import FRAMEWORKS, modules_need

pytest_pycollect_makemodule = modules_need(
    test_errors_page=FRAMEWORKS, test_format_page=["pandas"], test_release=["yaml"], test_snippets=FRAMEWORKS
)
