"""Tests which line a message names as the script's."""

import pytest
from typing_extensions import deprecated

from ampmem.own_code import script_line


def test_the_wrapper_of_a_deprecated_function_is_not_the_script() -> None:
    library = eval("lambda: script_line()", {"script_line": script_line})  # code of no file, like torch's own
    begins = test_the_wrapper_of_a_deprecated_function_is_not_the_script.__code__.co_firstlineno
    with pytest.deprecated_call():
        line = deprecated("use another one")(library)()
    assert line == f"{__file__}:{begins + 4}"
