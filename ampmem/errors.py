"""The errors that ampmem raises on purpose, and their common base class.

``ampmem.errors`` is there after ``import ampmem``. The command line prints an error in one line and exits with its
``exit_code``.
"""

from __future__ import annotations


class AmpmemError(Exception):
    """The base class of ampmem's errors: the message says what is wrong and what to do.

    ``exit_code`` is what the command line exits with: 1 when the tool or a check failed, 2 when the command was used
    wrongly.
    """

    exit_code = 1


class UsageError(AmpmemError):
    """The command or the call was given something invalid."""

    exit_code = 2


class RecordingError(AmpmemError):
    """A recording cannot be read or written."""


class NothingRecorded(AmpmemError):
    """The run ended without what a recording needs: a model, a backward or a step."""


class ChangeNotForced(AmpmemError):
    """A change that was to be forced on the script could not be made: the recording is of the script without it."""


class ModelElsewhere(NothingRecorded):
    """The model was not on the recorded device, so the recording says nothing about it."""
