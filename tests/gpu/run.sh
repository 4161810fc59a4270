#!/usr/bin/env bash
# All GPU tests in about SECONDS (default 400), several pytest processes side by side on one GPU or more, and a summary.
#   tests/gpu/run.sh [SECONDS] [FOLDER for the logs]
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-400} out=${2:-$(mktemp -d)}
export PYTHONPATH=$PWD/src PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore

part() {
  local name=$1
  shift
  timeout --signal INT --kill-after 10 "$seconds" \
    python3 -m pytest -q -p no:cacheprovider --tb=short --timeout 90 "$@" >"$out/$name.log" 2>&1 &
}
part operations_sdma tests/gpu/test_operations.py -k sdma
part operations_cu tests/gpu/test_operations.py -k cu
part operations_auto tests/gpu/test_operations.py -k auto
part kernels tests/gpu/test_kernels.py
part failures tests/gpu/test_failures.py
part graphs tests/gpu/test_graphs.py tests/gpu/test_streams.py tests/gpu/test_kernels_launched.py
part frameworks tests/gpu/test_frameworks.py
wait
for log in "$out"/*.log; do
  echo "== $(basename "$log" .log): $(grep -E 'passed|failed|no tests' "$log" | tail -1)"
  grep -E "^E  .*(Error|assert|holds|busy|wrong|died)|^FAILED" "$log" | cut -c1-300 | awk '!seen[$0]++' | head -12
done
! grep -qE "[0-9]+ (failed|error)" "$out"/*.log
