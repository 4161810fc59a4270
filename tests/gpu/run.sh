#!/usr/bin/env bash
# All GPU tests, several pytest processes side by side on one GPU or more, each part within SECONDS (default 300),
# and a summary.
#   tests/gpu/run.sh [SECONDS] [FOLDER for the logs]
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-300} out=${2:-$(mktemp -d)}
export PYTHONPATH=$PWD/src PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore

part() {
  local name=$1
  shift
  timeout --signal INT --kill-after 10 "$seconds" \
    python3 -m pytest -q -p no:cacheprovider --tb=short --timeout 90 "$@" >"$out/$name.log" 2>&1 &
}
# What takes longest in the background, and beside it what depends on times, and then the rest.
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())') number=0
for ranks in "W1 or W2" W4 W8 "not (W1 or W2 or W4 or W8)"; do # of one process each, so on one GPU
  CUDA_VISIBLE_DEVICES=$((number % gpus)) part "kernels_$number" tests/gpu/test_kernels.py -k "$ranks"
  number=$((number + 1))
done
part table_cu tests/gpu/test_table.py -k cu
long=$(jobs -p)
part failures tests/gpu/test_failures.py
part graphs tests/gpu/test_graphs.py
part streams tests/gpu/test_streams.py tests/gpu/test_kernels_launched.py
part one_sided tests/gpu/test_one_sided.py
part visible tests/gpu/test_visible_devices.py
part hosts tests/gpu/test_multinode.py
wait $(jobs -p | grep -vxF "$long")
part operations_sdma tests/gpu/test_operations.py -k sdma
part operations_cu tests/gpu/test_operations.py -k cu
part operations_auto tests/gpu/test_operations.py -k "auto or exchanges"
part table_sdma tests/gpu/test_table.py -k sdma
part frameworks tests/gpu/test_frameworks.py
wait
for log in "$out"/*.log; do
  echo "== $(basename "$log" .log): $(grep -E 'passed|failed|no tests' "$log" | tail -1)"
  grep -E "^E  .*(Error|assert|holds|busy|wrong|died)|^FAILED" "$log" | cut -c1-300 | awk '!seen[$0]++' | head -12
  grep -h "^table:" "$log"
done
! grep -qE "[0-9]+ (failed|error)" "$out"/*.log
