"""Numbers as people read them."""

import math

from fishleg.report.numbers import count, duration, number, percent, plain

NAN = math.nan


def test_numbers_for_people() -> None:
    nb = "\u00a0"
    cases = [(0.0, "0 s"), (0.35, "350 ms"), (4.21, "4.2 s"), (59.7, "1 min"), (123.4, "2 min 3 s")]
    cases += [(3599.8, "1 h"), (7300.0, "2 h 2 min"), (200_000.0, "2 d 8 h"), (-1.0, "0 s")]
    for seconds, text in cases:
        assert duration(seconds).replace(nb, " ") == text
    for value, text in ((12_345, "12.3 k"), (999_999, "1.00 M"), (999, "999"), (0, "0"), (1.09e6, "1.09 M")):
        assert count(value).replace(nb, " ") == text
    assert count(190_000, "B") == f"190{nb}kB"
    for value, text in (
        (0.98, "98.0"),
        (0.9951, "99.51"),
        (0.99999, "99.999"),
        (1.0, "100.00"),
        (0.0, "0.0"),
    ):
        assert percent(value) == f"{text}{nb}%"
    for value, text in ((1.5e-7, "1.5×10⁻⁷"), (-0.25, "−0.25"), (1234.0, "1230"), (1e6, "1×10⁶")):
        assert plain(value) == text
    assert [number(v) for v in (True, "1", None, NAN, math.inf, 10**400, 2)] == [None] * 6 + [2.0]
