"""What a worker's log says of an error: where it comes from, unless the line says all there is to say."""

import pytest

from bus.errors import LayoutError
from gradbus.build import _explained
from gradbus.workloads.base import DataError, WorkloadError


@pytest.mark.parametrize("kind", [WorkloadError, DataError, LayoutError])
def test_what_one_line_explains_has_no_traceback(kind: type[Exception], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise kind("the dataset here is not the one there")
    except kind as error:
        assert _explained(error) == "the dataset here is not the one there"
    assert capfd.readouterr().err == ""


def test_an_error_of_the_users_code_is_one_line_and_its_trace_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise ZeroDivisionError("unlucky")
    except ZeroDivisionError as error:
        told = _explained(error)
    assert told.startswith("ZeroDivisionError: unlucky (") and "test_build.py" in told
    assert "Traceback" in capfd.readouterr().err
