"""The plot of rates."""

from __future__ import annotations

from dsjob.planning.plot import draw


def test_each_point_is_a_star_at_its_height() -> None:
    assert draw([(0, 0.0), (5, 0.5), (10, 1.0)], height=3) == [
        "  1 |  *",
        "0.5 | *",
        "  0 |*",
        "     0 10  step",
    ]


def test_a_constant_rate_is_a_line_at_the_top_and_no_points_are_no_plot() -> None:
    lines = draw([(step, 0.1) for step in range(5)], height=3)
    assert lines[0].endswith("|*****")
    assert all("*" not in line for line in lines[1:])
    assert draw([]) == []
    assert draw([(0, 0.0)], height=2)[1].endswith("|*")
