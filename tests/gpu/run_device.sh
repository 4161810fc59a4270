#!/usr/bin/env bash
# The device side on one GPU or more: tests, then examples and measurements, in about SECONDS (default 240).
#   tests/gpu/run_device.sh [SECONDS] [FOLDER for the logs]
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-240} out=${2:-$(mktemp -d)}
export PYTHONPATH=$PWD/src PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0

part() {
  local name=$1
  shift
  timeout --signal INT --kill-after 10 "$seconds" \
    python3 -m pytest -q -p no:cacheprovider --tb=short --timeout 110 tests/gpu/test_device.py "$@" >"$out/$name.log" 2>&1 &
}
part memory -k "moves or atomics or gluon"
part blocks -k "puts_blocks or signals"
part tiles -k "puts_tiles or gives_up or triggered"
part others -k "adds or gathers or (context and not gluon)"
run() {
  timeout --kill-after 5 "$1" python3 -m torch.distributed.run --nproc-per-node 2 --master-port "$2" "${@:3}" 2>&1 |
    grep -vi warn | tail -14
}
run 60 29511 examples/two_languages.py >"$out/two_languages.txt" &
wait
echo "== two_languages: $(tr '\n' ' ' <"$out/two_languages.txt")"
for log in "$out"/*.log; do
  echo "== $(basename "$log" .log): $(grep -E 'passed|failed|no tests' "$log" | tail -1)"
  grep -E "^E  .*(Error|assert|holds|busy|wrong|died)|^FAILED" "$log" | cut -c1-400 | awk '!seen[$0]++' | head -14
done
for script in tests/gpu/measure_proxy.py tests/gpu/measure_gathers.py \
  "examples/gemm_send.py 8192" "examples/gather_gemm.py 8192" \
  "examples/gemm_send.py 8192 2048" "examples/gather_gemm.py 8192 2048"; do
  echo "== $script"
  # shellcheck disable=SC2086
  run 60 29512 $script
done
