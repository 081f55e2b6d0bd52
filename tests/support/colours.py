"""How different two colours look, to people with and without a colour-vision deficiency."""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

VISIONS: dict[str, list[list[float]]] = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""What becomes of linear RGB: Machado, Oliveira and Fernandes, 2009, at full severity."""

_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
_WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(colours: list[str], vision: str) -> Values:
    """CIELAB of colours as ``#rrggbb``, seen so; shape (colours, 3)."""
    coded = np.array([[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(VISIONS[vision]).T, 0, 1)
    ratio = seen @ _XYZ.T / _WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def difference(one: Values, two: Values) -> Values:
    """CIEDE2000 between colours in CIELAB, whose last axis is L*, a*, b*: Sharma, Wu and Dalal, 2005."""
    chroma = (np.hypot(one[..., 1], one[..., 2]) + np.hypot(two[..., 1], two[..., 2])) / 2
    g = 0.5 * (1 - np.sqrt(chroma**7 / (chroma**7 + 25**7)))
    (l1, c1, h1), (l2, c2, h2) = _polar(one, g), _polar(two, g)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    turn = np.where(np.abs(h2 - h1) > 180, np.where(h2 > h1, -360, 360), 0)
    grey = c1 * c2 == 0
    hue = np.where(grey, h1 + h2, (h1 + h2 + np.abs(turn) * np.where(h1 + h2 < 360, 1, -1)) / 2)
    turned = np.where(grey, 0, h2 - h1 + turn)
    parts = ((1, hue - 30, -0.17), (2, 2 * hue, 0.24), (3, 3 * hue + 6, 0.32), (4, 4 * hue - 63, -0.2))
    t = 1 + sum(weight * np.cos(np.radians(angle)) for _, angle, weight in parts)
    around = 30 * np.exp(-(((hue - 275) / 25) ** 2))
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * np.sin(np.radians(2 * around))
    by_l = (l2 - l1) / (1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2))
    by_c = (c2 - c1) / (1 + 0.045 * chroma)
    by_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turned / 2)) / (1 + 0.015 * chroma * t)
    return np.sqrt(by_l**2 + by_c**2 + by_h**2 + rotation * by_c * by_h)


def _polar(colour: Values, g: Values) -> tuple[Values, Values, Values]:
    a = (1 + g) * colour[..., 1]
    return colour[..., 0], np.hypot(a, colour[..., 2]), np.degrees(np.arctan2(colour[..., 2], a)) % 360


def least_difference(colours: list[str]) -> tuple[float, tuple[str, str, str]]:
    """The least of any two of ``colours`` in any vision, and of which two, in which."""
    found = []
    for vision in VISIONS:
        seen = lab(colours, vision)
        rows, columns = np.triu_indices(len(colours), 1)
        differences = difference(seen[rows], seen[columns])
        least = int(np.argmin(differences))
        found.append((float(differences[least]), (vision, colours[rows[least]], colours[columns[least]])))
    return min(found)
