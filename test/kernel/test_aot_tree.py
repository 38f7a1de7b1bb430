"""Every configuration that the launchers can pick must fit the chips it is picked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376}
SPILL_LIMIT = 512  # bytes a thread stores; what spills is read back once a step at most
SPILL_LIMIT_FP32 = (
    4096  # three products of tf32 hold every operand twice; slow, and for tests and small models
)


@pytest.mark.slow
def test_configurations_fit_the_chips():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("aot_tree.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["arch"] for result in results} == set(SHARED_LIMIT)
    for result in results:
        assert result["shared"] <= SHARED_LIMIT[result["arch"]], result
        limit = SPILL_LIMIT_FP32 if "tree_attention fp32" in result["name"] else SPILL_LIMIT
        assert result["spills"] <= limit, result
