#!/usr/bin/env bash
# compute-sanitizer over moelora.check (every op and forward on awkward shapes) and over the GPU tests.
#   tests/gpu/sanitize.sh memcheck|initcheck|racecheck [PYTEST_ARGS...]
# Without PYTEST_ARGS only moelora.check runs: on an H200 that does nothing else, half a minute under memcheck or initcheck; over ten
# minutes under racecheck. With them the tests follow, on one process per GPU test worker (such as `-n 6 -v -m "not slow"`; -v, so
# that a run that is cut off has named what failed). Six or seven workers, alone on a card, do four to seven tests a second under
# memcheck, and more workers no more; a test of thousands of replays, or in a process of its own, takes minutes. Under initcheck two a
# second, and a test of streams or graphs a minute, for it makes many reports (see below). Two runs in a dozen stood still after
# "created: N/N workers", before a test had begun, with 12 workers and with 7; why is not known: start again.
# No backtraces: where the tool keeps them, a process keeps what each call has allocated, its output and its workspace, which
# test_eager_calls_do_not_grow_memory sees, and which fills the card.
# racecheck leaves out the kernels whose rings are ordered by mbarriers written in PTX: racecheck_ring.cu shows why.
# memcheck leaves out errors of the API: one test asks for more memory than there is, and says so.
# memcheck looks at this library's kernels only, which makes it about twice as fast.
# initcheck reports reads of what a GEMM has stored by TMA, where nothing else had ever written that memory: it does not see
# such stores, as initcheck_tma.cu shows. In the layer tests, which poison the workspace with NaN first, no row is left unwritten.
# Two tests of the pool assert that work is still in flight, which it never is where the tools make every launch wait.
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=$1
shift
options=(--tool "$tool" --error-exitcode 9 --show-backtrace no)
if [ "$tool" = memcheck ]; then options+=(--report-api-errors no --kernel-name kns=moelora); fi
if [ "$tool" = racecheck ]; then
  for kernel in fused_decode_kernel prefill_gemm cutlass; do
    options+=(--kernel-name-exclude "kns=$kernel")
  done
fi
compute-sanitizer "${options[@]}" python -m moelora.check --device cuda
if [ $# -gt 0 ]; then
  pool=tests/gpu/test_pool_gpu.py
  compute-sanitizer "${options[@]}" --target-processes all python -m pytest tests/gpu -p no:cacheprovider \
    --deselect $pool::test_in_place_updates_beside_replays --deselect $pool::test_changes_wait_for_work_in_flight "$@"
fi
