#!/usr/bin/env bash
# The search of docs/tuning.md: `debug` at five learning rates. Writes what it prints, the versions and the processor to
# benchmarks/results/search_debug_2_cores.txt. About ten minutes on two idle cores.
set -eu -o pipefail
cd "$(dirname "$0")/.."
result=benchmarks/results/search_debug_2_cores.txt
{
    echo "# $(nproc) cores, $(uname -m); $("${PYTHON:-python3}" -m titanlite.cli --version | tr '\n' ' ')"
    echo '$ titanlite tune debug --training.steps=80 --optimizer.lr=1e-3:1.6e-2:5'
    "${PYTHON:-python3}" -m titanlite.cli tune debug --training.steps=80 --optimizer.lr=1e-3:1.6e-2:5 --output=outputs/debug_search "$@"
} | tee $result.new
mv $result.new $result
