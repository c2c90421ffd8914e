"""The soak (scripts/soak), for a short while: any mixture of faults, under load from several applications."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.process.conftest import ROOT, environment

SECONDS = float(os.environ.get("BATCH_INFERENCE_SOAK_SECONDS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_happens_every_request_ends_in_its_answer_or_in_an_error_that_it_may_end_in() -> None:
    command = [sys.executable, "-m", "tests.soak", str(SECONDS / 60), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=SECONDS + 500)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    counts = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("answers", "wrong")))
    assert int(counts["answers"]) > 100 and counts["wrong"] == "0"
