"""The page's colours are told apart by people who lack one of the three kinds of cones, computed.

How a colour looks to them: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
Vision Deficiency", IEEE Transactions on Visualization and Computer Graphics 15(6), 2009, the matrices of severity 1,
on linear RGB. How far two are apart: CIEDE2000, as Sharma, Wu and Dalal give it, Color Research and Application 30(1),
2005; 1 is just seen where two large fields touch, and from about 5 on nobody takes one small field for the other.
"""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

import rlinf.dashboard.report

CSS = (Path(rlinf.dashboard.report.__file__).parent / "page" / "page.css").read_text()
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = XYZ.sum(axis=1)
ACTIVITIES = (
    "generation",
    "training",
    "scoring",
    "simulation",
    "acting",
    "sync",
    "waiting",
    "loading",
    "parking",
    "saving",
)
ANY, NEIGHBOURS = None, 1
TOLD_APART = [  # which colours, how far apart, and of how many steps of a scale
    (ACTIVITIES, 9.5, ANY),
    ([f"other{n}" for n in range(4)], 9.5, ANY),
    ([f"run{n}" for n in range(6)], 9.5, ANY),
    ([f"v{n}" for n in range(6)], 8.5, ANY),
    (["card", *(f"p{n}" for n in range(1, 7))], 6.5, NEIGHBOURS),
    (["good", "bad"], 9.5, ANY),
]  # fmt: skip


def colours(ground):
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", light))
    return found | (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", dark)) if ground == "dark" else {})


def linear(colour):
    parts = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    share = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def delta_e(one, other):
    """CIEDE2000 of two colours, each as L*, a*, b*."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    more = 1.5 - math.sqrt(mean**7 / (mean**7 + 25**7)) / 2
    c1, c2 = math.hypot(a1 * more, b1), math.hypot(a2 * more, b2)
    h1, h2 = (math.degrees(math.atan2(b, a * more)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    terms = ((0.17, 1, 30), (-0.24, 2, 0), (-0.32, 3, -6), (0.20, 4, 63))
    weight = 1 - sum(size * math.cos(math.radians(times * hue - at)) for size, times, at in terms)
    far = (light - 50) ** 2
    dl = (l2 - l1) / (1 + 0.015 * far / math.sqrt(20 + far))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * chroma * weight)
    angle = math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2)))
    turned = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(angle)
    return math.sqrt(dl**2 + dc**2 + dh**2 + turned * dc * dh)


def contrast(one, other):
    """Of WCAG 2, 1 to 21."""
    dark, light = sorted(float(XYZ[1] @ linear(each)) for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
        ((50.0, -1.0, 2.0), (50.0, 0.0, 0.0), 2.3669),
    ],
)
def test_the_difference_is_the_one_that_the_paper_tabulates(one, other, told):
    assert delta_e(one, other) == pytest.approx(told, abs=1e-4)
    assert delta_e(other, one) == pytest.approx(told, abs=1e-4)


@pytest.mark.parametrize("ground", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize(("names", "least", "apart"), TOLD_APART, ids=[each[0][0] for each in TOLD_APART])
def test_colours_that_mean_something_are_told_apart(names, least, apart, eyes, ground):
    css = colours(ground)
    seen = [lab(np.array(SEEN_BY[eyes]) @ linear(css[name])) for name in names]
    for one, other in itertools.combinations(range(len(names)), 2):
        if apart is ANY or other - one == apart:
            assert delta_e(seen[one], seen[other]) > least, (names[one], names[other])


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_lines_are_seen_on_their_ground_and_text_is_read_on_its_own(ground):
    css = colours(ground)
    assert min(contrast(css[f"run{n}"], css["card"]) for n in range(6)) > 3
    assert min(contrast(css[name], css["card"]) for name in ACTIVITIES if name not in ("waiting", "parking")) > 2.2
    assert min(contrast(css[name], css["ink"]) for name in (f"v{n}" for n in range(6))) > 4.5
