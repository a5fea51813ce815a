"""The one rule of rounding for figures in pages and tables."""


def milliseconds(value: float) -> str:
    """Returns a time in milliseconds with four significant digits, and three decimals at most: 0.407, 2.236, 11.97."""
    return f"{value:.3f}" if value < 9.9995 else f"{value:.2f}" if value < 99.995 else f"{value:.1f}"


def times(value: float) -> str:
    """Returns a ratio with three significant digits, and with three decimals below 2, where they matter."""
    return f"{value:.3f}" if value < 1.9995 else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def with_interval(value: float, low: float, high: float) -> str:
    """Returns a ratio and the ends of its interval: 20.8 (10.2 to 42.6)."""
    return f"{times(value)} ({times(low)} to {times(high)})"
