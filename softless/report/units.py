"""Write numbers as people read them."""

from collections.abc import Sequence


def short(value: float) -> str:
    """Write at most three significant digits: 0.541, 34.4, 1,410."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def flops(value: float, beside: float = 0) -> str:
    """Write 34.4 GFLOP, in the unit of the larger number `beside` unless too little would be left of it."""
    names = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
    _, unit = _with_unit(max(value, beside), names).split()
    scale = 1000 ** names.index(unit)
    return f"{short(value / scale)} {unit}" if value / scale >= 0.1 else _with_unit(value, names)


def macs(value: float) -> str:
    """Write multiply-adds: 4.46 GMAC."""
    return _with_unit(value, ("MAC", "kMAC", "MMAC", "GMAC", "TMAC", "PMAC"))


def count(value: float) -> str:
    """Write a count: 29.2 M."""
    return _with_unit(value, ("", "k", "M", "G", "T")).rstrip()


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number and its noun: 1 image, 1,410 images."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str]) -> str:
    """Join names as a sentence does: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def percent(share: float) -> str:
    """Write a share in percent: 1.2%, 34%."""
    return f"{100 * share:.2g}%" if abs(share) < 0.1 else f"{share:,.0%}"


def picture(size: Sequence[int]) -> str:
    """Write height and width: 224 x 224."""
    return " x ".join(map(str, size))


def size(value: float) -> str:
    """Write bytes in decimal units: 16.8 MB."""
    return _with_unit(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds(value: float) -> str:
    """Write a measured time: 1.25 ms."""
    return f"{short(value)} s" if value >= 1 else f"{short(value * 1e3)} ms"


def duration(value: float) -> str:
    """Write a rough duration: 8 s, 2 min, 1.5 h."""
    if value < 90:
        return f"{max(value, 1):.0f} s"
    return f"{value / 60:.0f} min" if value < 90 * 60 else f"{short(value / 3600)} h"


def compare(ratio: float, more: str, less: str) -> str:
    """Compare two quantities by their ratio: '64x less', '1.5x more', 'the same'."""
    if 0.995 < ratio < 1.005:
        return "the same"
    return f"{short(ratio)}x {more}" if ratio > 1 else f"{short(1 / ratio)}x {less}"


def _with_unit(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{short(value)} {unit}"
        value /= 1000
    return f"{short(value)} {units[-1]}"
