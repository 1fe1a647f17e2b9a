"""The process that searches for lib/system/patterns.py: a line of JSON for each question, and one for its answer.

Started by its path, without site packages, so nothing of ours is imported. Its first argument is how many bytes it may
take.
"""

import contextlib
import json
import re
import resource
import sys


def found(pattern, text, is_full):  # type: ignore[no-untyped-def]
    """Whether the pattern matches all of the text; else the first group of its last match, or None."""
    if is_full:
        return re.fullmatch(pattern, text) is not None
    last = None
    for last in re.finditer(pattern, text, re.MULTILINE):
        pass
    return None if last is None else last.group(min(1, last.re.groups))


def main() -> None:
    limit = int(sys.argv[1])
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("{}", flush=True)  # ready
    for line in sys.stdin.buffer:
        try:
            answer = {"found": found(*json.loads(line))}
        except (re.error, MemoryError, RecursionError, OverflowError) as error:
            answer = {"fault": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
