"""The machine that finds matches: one pass over rows sorted by key and order, compiled.

**The search** from a first row takes the ways of the program in the order of preference and
backtracks. It ends as *matched*, as *failed* once no way is left, or as *open*: a preferred way
needs a row that is not there yet. An open search decides nothing, whatever other ways would give;
it is done again when there are more rows, or when time has passed so far that none can come. So
what is decided never depends on where micro-batches end.

**Conditions.** Each row has a bit for each variable: whether the part of the condition that looks
at this row alone holds. What refers to other rows of the match is a program for a stack machine
over numbers (`conditions` makes it); null is a value of its own, as in SQL, and NaN is compared
as Spark does it.

**No way twice.** Where conditions depend on nothing but the row and the first row (`memo`), a place
of the program that failed at a row fails again, and is not tried again: the search is linear in
the rows. Elsewhere the steps are counted, and bounded.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.records.columns.compiled import helper, kernel

# How a search ends.
FAILED: Final = 0
MATCHED: Final = 1
OPEN: Final = 2
TOO_MANY_STEPS: Final = 3
TOO_MANY_ROWS: Final = 4
# The next match could not begin anywhere else: there is no such row, or it is the first.
NO_ROW_TO_SKIP_TO: Final = 5
SKIPS_NOWHERE: Final = 6

SKIP_PAST_LAST: Final = 0
SKIP_TO_NEXT: Final = 1
SKIP_TO_FIRST: Final = 2
SKIP_TO_LAST: Final = 3

# The stack machine.
(
    CONST,
    NULL,
    NAV,
    AGG,
    ADD,
    SUB,
    MUL,
    DIV,
    MOD,
    NEG,
    ABS,
    EQ,
    NE,
    LT,
    LE,
    SAME,
    AND,
    OR,
    NOT,
    IS_NULL,
    COALESCE,
    LEAST,
    GREATEST,
    IF,
) = range(24)
LAST: Final = 0
FIRST: Final = 1
COUNT, SUM, AVG, MIN, MAX = range(5)
STACK: Final = 64

EXCLUDED: Final = 128


@helper
def _navigate(
    path_row: Any, path_var: Any, low: int, depth: int, mask: int, kind: int, offset: int
) -> int:
    """The row of a match that FIRST or LAST means; -1 if there is none."""
    if kind == 0:
        for at in range(depth - 1, low - 1, -1):
            if (mask >> (path_var[at] & 127)) & 1:
                if offset == 0:
                    return path_row[at]  # type: ignore[no-any-return]
                offset -= 1
    else:
        for at in range(low, depth):
            if (mask >> (path_var[at] & 127)) & 1:
                if offset == 0:
                    return path_row[at]  # type: ignore[no-any-return]
                offset -= 1
    return -1


@helper
def _is_less(a: float, b: float) -> bool:
    """Spark's order of doubles: NaN is equal to itself, and greater than all else."""
    return a < b or (b != b and a == a)  # noqa: PLR0124


@helper
def _is_same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)  # noqa: PLR0124


@helper
def _aggregate(
    path_row: Any,
    path_var: Any,
    depth: int,
    mask: int,
    kind: int,
    values: Any,
    valid: Any,
    col: int,
) -> tuple[float, bool]:
    """A number over the rows of variables so far, and whether there is one."""
    count, total, least, most = 0, 0.0, 0.0, 0.0
    for at in range(depth):
        if not (mask >> (path_var[at] & 127)) & 1:
            continue
        if col < 0:
            count += 1
        elif valid[col, path_row[at]]:
            value = values[col, path_row[at]]
            count += 1
            total += value
            # The first value is taken as it is: of NaNs alone the least is one too.
            if count == 1 or _is_less(value, least):
                least = value
            if count == 1 or _is_less(most, value):
                most = value
    if kind == 0:
        return float(count), True
    if count == 0:
        return 0.0, False
    if kind == 1:
        return total, True
    if kind == 2:
        return total / count, True
    return (least, True) if kind == 3 else (most, True)


@helper
def _holds(
    start: int,
    path_row: Any,
    path_var: Any,
    depth: int,
    first_row: int,
    values: Any,
    valid: Any,
    ops: Any,
    consts: Any,
    stack: Any,
    there: Any,
) -> bool:
    """Whether the condition whose program begins at `start` is true, the row being in the path."""
    top = -1
    at = start + 1
    for _ in range(ops[start, 1]):
        op = ops[at, 0]
        if op == 0:
            top += 1
            stack[top], there[top] = consts[ops[at, 1]], True
        elif op == 1:
            top += 1
            stack[top], there[top] = 0.0, False
        elif op == 2:
            row = _navigate(path_row, path_var, 0, depth, ops[at, 2], ops[at, 3], ops[at, 4])
            top += 1
            stack[top], there[top] = 0.0, False
            if row >= 0 and row - ops[at, 5] >= first_row:
                row -= ops[at, 5]
                if valid[ops[at, 1], row]:
                    stack[top], there[top] = values[ops[at, 1], row], True
        elif op == 3:
            top += 1
            stack[top], there[top] = _aggregate(
                path_row, path_var, depth, ops[at, 2], ops[at, 3], values, valid, ops[at, 1]
            )
        elif op == 9:
            stack[top] = -stack[top]
        elif op == 10:
            stack[top] = abs(stack[top])
        elif op == 18:
            stack[top] = 1.0 - stack[top]
        elif op == 19:
            stack[top] = 0.0 if there[top] else 1.0
            there[top] = True
        elif op == 23:
            top -= 2
            chosen = top + 1 if there[top] and stack[top] != 0.0 else top + 2
            stack[top], there[top] = stack[chosen], there[chosen]
        else:
            top -= 1
            _binary(op, stack, there, top)
        at += 1
    return bool(there[0] and stack[0] != 0.0)


@helper
def _binary(op: int, stack: Any, there: Any, top: int) -> None:
    """What takes two values, the second above the first: puts the result in place of the first."""
    a, b = stack[top], stack[top + 1]
    has_a, has_b = there[top], there[top + 1]
    if op == 16:
        no = (has_a and a == 0.0) or (has_b and b == 0.0)
        there[top] = no or (has_a and has_b)
        stack[top] = 0.0 if no else 1.0
    elif op == 17:
        yes = (has_a and a != 0.0) or (has_b and b != 0.0)
        there[top] = yes or (has_a and has_b)
        stack[top] = 1.0 if yes else 0.0
    elif op == 15:
        same = (has_a and has_b and _is_same(a, b)) or (not has_a and not has_b)
        stack[top], there[top] = 1.0 if same else 0.0, True
    elif op == 20:
        if not has_a:
            stack[top], there[top] = b, has_b
    elif op == 21 or op == 22:  # noqa: PLR1714 (a set is compiled for a second)
        if not has_a or (has_b and (_is_less(b, a) if op == 21 else _is_less(a, b))):
            stack[top], there[top] = b, has_b
    else:
        there[top] = has_a and has_b
        if op == 4:
            stack[top] = a + b
        elif op == 5:
            stack[top] = a - b
        elif op == 6:
            stack[top] = a * b
        elif op == 7 or op == 8:  # noqa: PLR1714
            if b == 0.0:
                there[top] = False
            else:
                stack[top] = a / b if op == 7 else np.fmod(a, b)
        elif op == 11:
            stack[top] = 1.0 if _is_same(a, b) else 0.0
        elif op == 12:
            stack[top] = 0.0 if _is_same(a, b) else 1.0
        elif op == 13:
            stack[top] = 1.0 if _is_less(a, b) else 0.0
        elif op == 14:
            stack[top] = 0.0 if _is_less(b, a) else 1.0


@helper
def _takes(variable: int, row: int, depth: int, first_row: int, seen: Any) -> bool:
    """Whether a row, as the next of the match, fulfils the condition of a variable."""
    bits, starts, path_row, path_var, values, valid, ops, consts, stack, there = seen
    if not (bits[row] >> variable) & 1:
        return False
    if starts[variable] < 0:
        return True
    path_row[depth], path_var[depth] = row, variable
    start = starts[variable]
    depth += 1
    return bool(
        _holds(
            start, path_row, path_var, depth, first_row, values, valid, ops, consts, stack, there
        )
    )


@helper
def _takes_any(forbidden: int, row: int, depth: int, first_row: int, seen: Any) -> bool:
    for variable in range(len(seen[1])):
        if (forbidden >> variable) & 1 and _takes(variable, row, depth, first_row, seen):
            return True
    return False


@helper
def _grown(array: Any, needed: int) -> Any:
    if needed <= len(array):
        return array
    bigger = np.empty(max(needed, 2 * len(array)), array.dtype)
    # Row by row: for what slices of other shapes would say numba compiles texts, for seconds.
    for at in range(len(array)):
        bigger[at] = array[at]
    return bigger


@helper
def _more_ways(ways: Any, needed: int) -> Any:
    if needed <= len(ways):
        return ways
    bigger = np.empty((2 * len(ways), 3), np.int64)
    for at in range(len(ways)):
        for part in range(3):
            bigger[at, part] = ways[at, part]
    return bigger


@helper
def _search(
    begin: int,
    end: int,
    first_row: int,
    closed: bool,
    within: int,
    times: Any,
    code: Any,
    ways: Any,
    tried: Any,
    stamp: int,
    limits: Any,
    seen: Any,
) -> Any:
    """From a first row: how it ends, how long the path is, and the room for ways to try."""
    max_rows, fails_on_rows, max_steps, memo, width = limits
    path_row, path_var = seen[2], seen[3]
    steps, waiting = 0, 1
    ways[0, 0], ways[0, 1], ways[0, 2] = 0, begin, 0
    while waiting > 0:
        waiting -= 1
        pc, row, depth = ways[waiting, 0], ways[waiting, 1], ways[waiting, 2]
        while True:
            steps += 1
            if steps > max_steps:
                return TOO_MANY_STEPS, depth, ways
            op = code[pc, 0]
            if op == 2:
                pc = code[pc, 1]
                continue
            if op == 1:
                if memo:
                    place = pc * width + row - begin
                    if tried[place] == stamp:
                        break
                    tried[place] = stamp
                ways = _more_ways(ways, waiting + 1)
                ways[waiting, 0], ways[waiting, 1], ways[waiting, 2] = code[pc, 2], row, depth
                waiting += 1
                pc = code[pc, 1]
                continue
            if op == 6:
                return MATCHED, depth, ways
            # All others look at a row.
            none = row >= end
            if none and not closed:
                return OPEN, depth, ways
            none = none or (within >= 0 and times[row] - times[begin] > within)
            if not none and row - begin >= max_rows:
                if fails_on_rows:
                    return TOO_MANY_ROWS, depth, ways
                break
            if op == 0:
                if none or not _takes(code[pc, 1], row, depth, first_row, seen):
                    break
                path_row[depth] = row
                path_var[depth] = code[pc, 1] + EXCLUDED * code[pc, 2]
                depth, row, pc = depth + 1, row + 1, pc + 1
            elif none:
                if op == 3:
                    break
                pc += 1
            elif _takes_any(code[pc, 1], row, depth, first_row, seen):
                break
            else:
                row += 0 if op == 5 else 1
                pc += 0 if op == 4 else 1
    return FAILED, 0, ways


@kernel(
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64, boolean, int64, int64[::1],"
    " float64[:, ::1], uint8[:, ::1], int64[:, ::1], float64[::1], int64[::1], int64[:, ::1],"
    " boolean, int64, int64, int64, boolean, int64)"
)
def find(
    group_first: Any,
    group_end: Any,
    group_from: Any,
    times: Any,
    watermark: int,
    complete: bool,
    within: int,
    bits: Any,
    values: Any,
    valid: Any,
    ops: Any,
    consts: Any,
    starts: Any,
    code: Any,
    memo: bool,
    skip: int,
    skip_mask: int,
    max_rows: int,
    fails_on_rows: bool,
    max_steps: int,
) -> Any:
    """All matches that are certain, key by key.

    The rows of a key are `group_first` to `group_end`, which are before the watermark, and starts
    before `group_from` are decided already. Gives for each match its key and the end of its part
    of the path (rows and variables), for each key where to go on, and if a limit was hit which,
    and at which key.
    """
    longest = 1
    for group in range(len(group_first)):
        longest = max(longest, min(group_end[group] - group_from[group], max_rows) + 1)
    tried = np.zeros(len(code) * (longest + 1) if memo else 1, np.int64)
    path_row, path_var = np.empty(longest + 2, np.int64), np.empty(longest + 2, np.uint8)
    ways = np.empty((256, 3), np.int64)
    stack, there = np.empty(STACK, np.float64), np.empty(STACK, np.bool_)
    seen = (bits, starts, path_row, path_var, values, valid, ops, consts, stack, there)
    limits = (max_rows, fails_on_rows, max_steps, memo, longest + 1)
    out_group, out_end = np.empty(1024, np.int64), np.empty(1024, np.int64)
    out_row, out_var = np.empty(4096, np.int64), np.empty(4096, np.uint8)
    matches, taken, stamp, status, culprit = 0, 0, 0, 0, -1
    next_from = group_from.copy()
    result = 0
    for group in range(len(group_first)):
        end, begin = group_end[group], group_from[group]
        while begin < end:
            closed = complete or (within >= 0 and watermark > times[begin] + within)
            stamp += 1
            result, depth, ways = _search(
                begin, end, group_first[group], closed, within, times, code, ways, tried, stamp,
                limits, seen,
            )  # fmt: skip
            if result >= OPEN:
                break
            following = begin + 1
            if result == MATCHED and depth > 0:
                out_row, out_var = _grown(out_row, taken + depth), _grown(out_var, taken + depth)
                for at in range(depth):
                    out_row[taken], out_var[taken] = path_row[at], path_var[at]
                    taken += 1
                out_group, out_end = _grown(out_group, matches + 1), _grown(out_end, matches + 1)
                out_group[matches], out_end[matches] = group, taken
                matches += 1
                if skip == SKIP_PAST_LAST:
                    following = path_row[depth - 1] + 1
                elif skip != SKIP_TO_NEXT:
                    kind = FIRST if skip == SKIP_TO_FIRST else LAST
                    found = _navigate(path_row, path_var, 0, depth, skip_mask, kind, 0)
                    if found <= begin:
                        result = NO_ROW_TO_SKIP_TO if found < 0 else SKIPS_NOWHERE
                        break
                    following = found
            begin = following
        next_from[group] = begin
        if begin < end and result > OPEN:
            status, culprit = result, group
            break
    return (
        out_group[:matches], out_end[:matches], out_row[:taken], out_var[:taken], next_from,
        status, culprit,
    )  # fmt: skip


@kernel("(int64[::1], uint8[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64[::1])")
def navigated(
    path_row: Any,
    path_var: Any,
    lows: Any,
    highs: Any,
    mask: int,
    kind: int,
    offset: int,
    back: int,
    first_rows: Any,
) -> Any:
    """For parts of the path the row that FIRST or LAST, and PREV of it, means; -1 for none.

    Not the row but its place in the path where `back` is -1: for CLASSIFIER.
    """
    out = np.full(len(lows), -1, np.int64)
    for at in range(len(lows)):
        left = offset
        low, high = lows[at], highs[at]
        for step in range(high - low):
            place = high - 1 - step if kind == 0 else low + step
            if (mask >> (path_var[place] & 127)) & 1:
                if left == 0:
                    row = path_row[place] - max(back, 0)
                    if back < 0:
                        out[at] = place
                    elif row >= first_rows[at]:
                        out[at] = row
                    break
                left -= 1
    return out
