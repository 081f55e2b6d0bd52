"""The returns of one function of the script's, where the user says that they end steps."""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

from ampmem.errors import UsageError
from ampmem.patching import Undo, added
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.marker import Marker

_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)


class Calls:
    """Looks at every Python call on the recorded thread: the function need not exist yet, nor be in a module."""

    def __init__(self, marker: Marker, listener: Listener) -> None:
        self._marker = marker
        self._listener = listener
        self._known: dict[int, tuple[CodeType, bool]] = {}
        """By ``id``, code of the function's name, and whether it is the function's."""
        self.elsewhere: str | None = None
        """Where a function of that name has run that is another one."""

    def install(self) -> Undo:
        """Begin to look; returns what ends it. Raises :class:`UsageError` while another profiler looks."""
        if sys.getprofile() is not None:
            raise UsageError(f"--step-on {self._marker.text}: a profiler is active (sys.setprofile); stop it first")
        name, see = self._marker.function, self._see

        def profiler(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code.co_name == name:
                see(frame)

        def remove() -> None:
            if sys.getprofile() is profiler:
                sys.setprofile(None)

        sys.setprofile(profiler)
        return added("sys", "setprofile", remove)

    def _see(self, frame: FrameType) -> None:
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            module = str(frame.f_globals.get("__name__", ""))
            known = self._known[id(code)] = (code, self._marker.is_in(code, module))
            if not known[1]:
                self.elsewhere = f"{code.co_filename}:{code.co_qualname}"
        # A generator that yields and a call that raises leave their frames too, but not by an instruction to return.
        if known[1] and code.co_code[frame.f_lasti] in _RETURNS and self._listener.on_thread():
            self._listener.function_returned()
