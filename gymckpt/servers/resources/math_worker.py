"""A process that compares mathematics, one pair at a time: a line of JSON in, a line of JSON out, until stdin ends.

Parsing and comparing can take for ever; here a signal ends it, which works only in a process's main thread, and if that
fails too, whoever asked ends the process.
"""

import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from gymckpt import jsoncodec

PARSE_S = 5
COMPARE_S = 5


def same(expected: str, said: str) -> tuple[bool, str | None]:
    """Whether what was said ends in the expected answer, and what was found in it."""
    gold = parse(_boxed(expected), [LatexExtractionConfig()], parsing_timeout=PARSE_S)
    found = parse(said, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=PARSE_S)
    return verify(gold, found, timeout_seconds=COMPARE_S), str(found[-1]) if found else None


def _boxed(expected: str) -> str:
    plain = expected.strip().strip("$")
    return plain if "\\boxed" in plain else f"\\boxed{{{plain}}}"


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin.buffer:
        asked = jsoncodec.loads(line)
        right, found = same(asked["expected"], asked["said"])
        sys.stdout.buffer.write(jsoncodec.dumps({"right": right, "found": found}) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
