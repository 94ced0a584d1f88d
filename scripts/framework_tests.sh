#!/usr/bin/env bash
# Prints the test files that run with agent-lightning, VERL or torchdata, the rig and the contracts among them: the others
# give the same result whatever the versions of these are. Left out as well: those that vary what is this package's own
# over the same few calls of the frameworks, and take minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
grep -rlE '^ *(from|import) (tests\.(rig|contract|switch_on)|verl|agentlightning|torchdata)' tests/{agl,ledger,rig,yardstick} --include="test_*.py" |
  grep -vE '_(property|changes)\.py$|test_changed_settings\.py$'
