"""Which frames of a stack are worth a look: those of the user's own code."""

from __future__ import annotations

from collections.abc import Sequence

_TORCH = ("/torch/", "<frozen ")
_LIBRARIES = ("/site-packages/", "/dist-packages/", *_TORCH)


def user_frames(stack: Sequence[str]) -> list[str]:
    """The frames outside the libraries, else those outside torch (a script may be installed), else the innermost."""
    for hidden in (_LIBRARIES, _TORCH):
        own = [frame for frame in stack if not any(part in frame for part in hidden)]
        if own:
            return own
    return list(stack[-1:])


def user_frame(stack: Sequence[str]) -> str | None:
    """The innermost of :func:`user_frames`."""
    return next(reversed(user_frames(stack)), None)
