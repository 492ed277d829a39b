"""Settings for drivers of tests: expressions are interpreted, and not made to code, but in `proof`.

A query that is run a few times over some dozen rows takes longer to compile than to run. The
drivers of `penstock run` and of `test_kills.py` make code in every profile, as users' do.
"""

from __future__ import annotations

from typing import Final

from tests.harness.profiles import PROFILE, Profile

INTERPRETED: Final[dict[str, str]] = (
    {}
    if PROFILE is Profile.PROOF
    else {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
)
