"""Errors, as the page and the documentation write them."""

SMALLEST = 0.00005
"""From which error on there is something but zeros in its digits."""


def percent(error: float | None) -> str:
    """An error without its sign; never rounded to 0 where it is not."""
    if error is None:
        return ""
    if error == 0:
        return "0 %"
    return "< 0.01 %" if error < SMALLEST else f"{error:.2%}".replace("%", " %")


def signed(error: float | None) -> str:
    """An error with its sign, where any of its digits is shown."""
    if error is None:
        return ""
    sign = "" if abs(error) < SMALLEST else "+" if error > 0 else "-"
    return sign + percent(abs(error))
