"""Numbers as text for a reader."""

from __future__ import annotations

from typing import Any

NO_BREAK_SPACE = "\u00a0"  # keeps a number and its unit on one line
EXPONENT_DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Any) -> float | None:
    """Return a value of the record as a number that can be drawn.

    Args:
        value: Any value. Records hold null, NaN and infinities too.

    Returns:
        The number; None where the value is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The bound keeps differences and pixel positions finite.
    return float(value) if abs(value) < 1e100 else None


def with_minus_sign(text: str) -> str:
    """Replace hyphens by minus signs.

    Args:
        text: A number as text.

    Returns:
        The text with minus signs.
    """
    return text.replace("-", "−")


def plain(value: float) -> str:
    """Write a number with three significant digits, as a power of ten if it is very large or small.

    >>> plain(0.012345), plain(1234567.0)
    ('0.0123', '1.23×10⁶')

    Args:
        value: The number.

    Returns:
        The text.
    """
    rounded = float(f"{value:.3g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e5:
        return with_minus_sign(f"{rounded:.15g}")
    mantissa, exponent = f"{rounded:.2e}".split("e")
    mantissa = with_minus_sign(mantissa.rstrip("0").rstrip("."))
    return mantissa + f"×10{str(int(exponent)).translate(EXPONENT_DIGITS)}"


def count(value: float, unit: str = "") -> str:
    """Write an amount with a unit prefix, such as `272 k` or `1.09 MB`.

    Args:
        value: The amount.
        unit: The unit after the prefix.

    Returns:
        The text.
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(float(f"{value:.3g}")) < 1000 or prefix == "P":
            break
        value /= 1000
    text = with_minus_sign(f"{value:#.3g}".rstrip(".")) if prefix and abs(value) < 1e4 else plain(value)
    return f"{text}{NO_BREAK_SPACE if prefix or unit else ''}{prefix}{unit}"


def duration(seconds: float) -> str:
    """Write a duration, such as `350 ms`, `4.2 s`, `2 min 3 s` or `1 h 2 min`.

    Args:
        seconds: The duration in seconds.

    Returns:
        The text.
    """
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}{NO_BREAK_SPACE}ms" if seconds else f"0{NO_BREAK_SPACE}s"
    if seconds < 9.95:
        return f"{seconds:.1f}{NO_BREAK_SPACE}s"
    whole = round(seconds)
    for small, large, size in (("s", "min", 60), ("min", "h", 60), ("h", "d", 24)):
        if whole < size:
            return f"{whole}{NO_BREAK_SPACE}{small}"
        if whole < size * (24 if large == "h" else 60) or large == "d":
            break
        whole = round(whole / size)
    big, rest = divmod(whole, size)
    return f"{big}{NO_BREAK_SPACE}{large}" + (f" {rest}{NO_BREAK_SPACE}{small}" if rest else "")


def milliseconds(value: float) -> str:
    """Write a duration in milliseconds with three significant digits.

    Args:
        value: The duration in milliseconds.

    Returns:
        The text.
    """
    return f"{plain(value)}{NO_BREAK_SPACE}ms"


def percent(fraction: float, digits: int = 1) -> str:
    """Write a fraction in per cent. A fraction below 1 gets enough digits not to read 100 %.

    Args:
        fraction: The fraction.
        digits: The number of digits after the point.

    Returns:
        The text.
    """
    if digits == 1 and fraction >= 0.99:
        digits = 2
    while digits < 6 and fraction < 1 and float(f"{100 * fraction:.{digits}f}") >= 100:
        digits += 1
    return with_minus_sign(f"{100 * fraction:.{digits}f}") + f"{NO_BREAK_SPACE}%"
