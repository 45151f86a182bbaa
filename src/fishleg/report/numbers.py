"""Numbers for people."""

from __future__ import annotations

from typing import Any

NB = "\u00a0"  # keeps a number and its unit on one line


EXPONENTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Any) -> float | None:
    """A number that can be drawn, or None: records hold null, NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # the bound keeps differences and pixel positions finite
    return float(value) if abs(value) < 1e100 else None


def signed(text: str) -> str:
    """With a true minus sign."""
    return text.replace("-", "−")


def plain(value: float) -> str:
    """Three significant digits, with a power of ten where zeros would have to be counted."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e5:
        return signed(f"{rounded:.15g}")
    mantissa, exponent = f"{rounded:.2e}".split("e")
    return signed(mantissa.rstrip("0").rstrip(".")) + f"×10{str(int(exponent)).translate(EXPONENTS)}"


def count(value: float, unit: str = "") -> str:
    """`272 k`, `1.09 MB`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(float(f"{value:.3g}")) < 1000 or prefix == "P":
            break
        value /= 1000
    text = signed(f"{value:#.3g}".rstrip(".")) if prefix and abs(value) < 1e4 else plain(value)
    return f"{text}{NB if prefix or unit else ''}{prefix}{unit}"


def duration(seconds: float) -> str:
    """`350 ms`, `4.2 s`, `2 min 3 s`, `1 h 2 min`."""
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}{NB}ms" if seconds else f"0{NB}s"
    if seconds < 9.95:
        return f"{seconds:.1f}{NB}s"
    whole = round(seconds)
    for small, large, size in (("s", "min", 60), ("min", "h", 60), ("h", "d", 24)):
        if whole < size:
            return f"{whole}{NB}{small}"
        if whole < size * (24 if large == "h" else 60) or large == "d":
            break
        whole = round(whole / size)
    big, rest = divmod(whole, size)
    return f"{big}{NB}{large}" + (f" {rest}{NB}{small}" if rest else "")


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction in per cent; digits are added until what is almost everything no longer reads 100 %."""
    if digits == 1 and fraction >= 0.99:
        digits = 2
    while digits < 6 and fraction < 1 and float(f"{100 * fraction:.{digits}f}") >= 100:
        digits += 1
    return signed(f"{100 * fraction:.{digits}f}") + f"{NB}%"
