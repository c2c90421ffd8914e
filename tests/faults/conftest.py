"""The checks of the process tests: nothing may be left behind."""

from tests.process.conftest import (
    nothing_is_left_behind,
    nothing_is_left_behind_by_the_module,
    pytest_runtest_makereport,
)

__all__ = ["nothing_is_left_behind", "nothing_is_left_behind_by_the_module", "pytest_runtest_makereport"]
