#!/usr/bin/env bash
# compute-sanitizer over moelora.check (every op and forward on awkward shapes) and over the GPU tests.
#   tests/gpu/sanitize.sh memcheck|initcheck|racecheck [PYTEST_ARGS...]
# Without PYTEST_ARGS only moelora.check runs: on an H200 with nothing beside it a few minutes under memcheck and initcheck,
# over ten under racecheck. With them the tests follow, on one process per GPU test worker (such as `-n 5 -m "not slow"`):
# memcheck had done a third of them in nine minutes beside other work.
# racecheck leaves out the kernels whose rings are ordered by mbarriers written in PTX: racecheck_ring.cu shows why.
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=$1
shift
options=(--tool "$tool" --error-exitcode 9)
if [ "$tool" = racecheck ]; then
  for kernel in fused_decode_kernel prefill_gemm cutlass; do
    options+=(--kernel-name-exclude "kns=$kernel")
  done
fi
compute-sanitizer "${options[@]}" python -m moelora.check --device cuda
if [ $# -gt 0 ]; then
  compute-sanitizer "${options[@]}" --target-processes all python -m pytest tests/gpu -p no:cacheprovider "$@"
fi
