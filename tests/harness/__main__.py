"""Run the tests of a profile, and those that failed once more: `python -m tests.harness PROFILE`.

A test that fails is run once more, alone in a process of its own and with the same seed, when all
others are done. If it fails again, the run fails. If it passes, the run passes and prints `flaky:
TEST` with the output of both runs, and the test is added to `tests/flaky.md`, where it stays until
its cause is found. `proof` gives no second chance, and neither does a run in which many tests fail
or which stops before its end.

Further arguments go to pytest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.harness import failures, flaky, seeds
from tests.harness.profiles import VARIABLE, Profile

# The exit codes of pytest that matter here.
OK: Final = 0
TESTS_FAILED: Final = 1
# More than this is no bad luck.
SECOND_CHANCES: Final = 8
MARKS: Final = {
    Profile.CHECK: "not java and not databases and not processes",
    Profile.TEST: "",
    Profile.PROOF: "",
}


def pytest(profile: Profile, run: Path, arguments: list[str], replay: str | None = None) -> int:
    """One run of pytest in a process of its own; its exit code."""
    # A run inside of a run, as in the tests of this, is not a worker of the outer one.
    inherited = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    environment = {**inherited, VARIABLE: profile, failures.RUN_VARIABLE: str(run)}
    environment.pop(failures.REPLAY_VARIABLE, None)
    if replay is not None:
        environment[failures.REPLAY_VARIABLE] = replay
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def second_chance(profile: Profile, run: Path) -> int:
    """Run the failed tests again, one by one; the exit code of the whole."""
    first = failures.by_test(failures.read(run / failures.FIRST_FILE))
    if not first or len(first) > SECOND_CHANCES:
        return TESTS_FAILED
    if not (run / failures.COMPLETE_FILE).exists():
        print("\nthe run stopped early: no second chance")
        return TESTS_FAILED
    print(f"\nrun once more, alone: {len(first)} failed", flush=True)
    for nodeid in first:
        file = nodeid.partition("::")[0]
        pytest(profile, run, ["-p", "no:cacheprovider", "-q", file], replay=nodeid)
    second = failures.by_test(failures.read(run / failures.SECOND_FILE))
    failed_again = []
    for nodeid, outcomes in first.items():
        again = second.get(nodeid, [])
        if failures.has_passed(again):
            flaky.report(nodeid, outcomes, again)
        else:
            failed_again.append(nodeid)
    for nodeid in failed_again:
        print(f"failed twice: {nodeid}")
    print(f"\n{len(failed_again)} failed twice, {len(first) - len(failed_again)} flaky")
    return TESTS_FAILED if failed_again else OK


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in list(Profile):
        print(f"usage: python -m tests.harness {'|'.join(Profile)} [pytest's arguments]")
        return 2
    profile = Profile(arguments[0])
    # Both runs inherit it.
    seeds.run_seed()
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that the tests
    # start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Path(tempfile.mkdtemp(prefix="penstock-run-"))
    try:
        # What the caller gives comes last, and wins.
        marks = ["-m", MARKS[profile]] if MARKS[profile] else []
        code = pytest(profile, run, [*marks, *arguments[1:]])
        if code == TESTS_FAILED and profile is not Profile.PROOF:
            code = second_chance(profile, run)
        return code
    finally:
        shutil.rmtree(run, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
