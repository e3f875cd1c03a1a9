"""Numbers as people read them."""


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3m 20s`, `2h 05m`, `3d 4h`; negative ones with a minus."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


def size(count_bytes: float) -> str:
    """`812 B`, `4.3 kB`, `1.2 GB`: powers of a thousand."""
    if count_bytes < 1000:
        return f"{count_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count_bytes /= 1000
        if count_bytes < 999.95 or unit == "TB":
            return f"{count_bytes:.1f} {unit}"
    raise AssertionError("unreachable")


def count(number: int) -> str:
    """`12,345`."""
    return f"{number:,}"


def visible(text: str) -> str:
    """`text` with its control characters as escapes: what servers and files say must not drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
