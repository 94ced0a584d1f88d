#!/usr/bin/env bash
# Prints the test files that run with agent-lightning, VERL or torchdata, the rig and the contracts among them: the others
# give the same result whatever the versions of these are.
set -euo pipefail
cd "$(dirname "$0")/.."
grep -lE '^ *(from|import) (tests\.(rig|contract|switch_on)|verl|agentlightning|torchdata)|importorskip\("(verl|agentlightning)' tests/{verl,ledger}/test_*.py
