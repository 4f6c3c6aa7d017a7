"""Where the main thread of a process spends its time: a timer interrupts it and notes the stack.

A thread that looks at others is no good for this: it has to wait until they let go of the interpreter, which they do
where they wait, and so it sees them waiting.
"""

import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

OURS = re.compile(r"\((bus|ps|worker)/")
EVERY_S = 0.0011  # not a divisor of anything that happens regularly

Stack = tuple[tuple[CodeType, int | None], ...]


@contextmanager
def sampled(path: str | None) -> Iterator[dict[str, float]]:
    """The seconds that pass, on the clock and on the processor. With ``path``, stacks go there: one a line with its
    count, as flame graph tools read them. Takes SIGALRM over."""
    seen: Counter[Stack] = Counter()
    cost: dict[str, float] = {}
    if path:
        signal.signal(signal.SIGALRM, lambda number, frame: seen.update([_stack(frame)]))
        signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    before = _clocks()
    try:
        yield cost
    finally:
        wall_s, loop_s, process_s = (now - then for now, then in zip(_clocks(), before, strict=True))
        cost |= {"wall_s": wall_s, "loop_s": loop_s, "others_s": process_s - loop_s}
        if path:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            Path(path).write_text("".join(f"{_text(stack)} {count}\n" for stack, count in seen.most_common()))


def _clocks() -> tuple[float, float, float]:
    return time.monotonic(), time.thread_time(), time.process_time()


def _stack(frame: FrameType | None) -> Stack:
    """From the line that runs to the outermost call."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(stack)


def _text(stack: Stack) -> str:
    """From the outermost call to the line that runs, as one line."""
    return ";".join(
        f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{line})" for code, line in reversed(stack)
    )


def lines(path: Path) -> list[tuple[float, str]]:
    """The lines that ran most often: the share of samples, and the line with its caller."""
    seen: Counter[str] = Counter()
    for stack, count in _rows(path):
        seen[" < ".join(stack[:-3:-1])] += count
    return _shares(seen, seen.total())


def functions(path: Path) -> list[tuple[float, str]]:
    """The functions of the project that were on the stack most often, whatever they had called."""
    seen: Counter[str] = Counter()
    for stack, count in _rows(path):
        calls = {call.rpartition(":")[0] + ")" for call in stack if OURS.search(call)}
        seen.update(dict.fromkeys(calls, count))
    return _shares(seen, sum(count for _, count in _rows(path)))


def _rows(path: Path) -> Iterator[tuple[list[str], int]]:
    for row in path.read_text().splitlines():
        stack, count = row.rsplit(" ", 1)
        yield stack.split(";"), int(count)


def _shares(seen: Counter[str], samples: int) -> list[tuple[float, str]]:
    return [(count / samples, name) for name, count in seen.most_common()]
