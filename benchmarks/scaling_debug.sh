#!/usr/bin/env bash
# The law of docs/planning.md: twelve tiny runs of four widths and three lengths, the law that `titanlite plan --fit`
# finds, its forecast of a larger and longer run, and that run's loss. Writes what the commands print, the versions and
# the processor to benchmarks/results/scaling_debug_2_cores.txt. About four
# minutes of one core; the same command continues after a stop.
set -eu -o pipefail
cd "$(dirname "$0")/.."
result=benchmarks/results/scaling_debug_2_cores.txt
folder=outputs/scaling
export OMP_NUM_THREADS=1
titanlite() { "${PYTHON:-python3}" -m titanlite.cli "$@"; }

settings() { # width steps: peak rates are proportional to 1 / width
    echo "--model.overrides.dim=$1 --model.overrides.hidden_dim=$((3 * $1)) --model.overrides.n_heads=$(($1 / 8))" \
        "--model.overrides.n_kv_heads=$(($1 / 8)) --optimizer.lr=$(awk "BEGIN { print 0.2 / $1 }") --training.steps=$2"
}
train() { # width steps folder; not again if it has ended
    if grep -q 'validation loss .* over' "$3.log" 2>/dev/null; then return; fi
    # shellcheck disable=SC2046
    titanlite train benchmarks/scaling_debug.toml $(settings "$1" "$2") --job.dump_folder="$3" >"$3.log" 2>&1
}

mkdir -p $folder/ladder
for steps in 600 1400 3200; do
    for width in 16 24 32 48; do train $width $steps $folder/ladder/$width-$steps; done
done
{
    echo "# $(nproc --all) cores, $(uname -m); $(titanlite --version | tr '\n' ' ')"
    echo "\$ titanlite plan --fit $folder/ladder"
    titanlite plan --fit $folder/ladder
    echo "\$ titanlite plan benchmarks/scaling_debug.toml $(settings 64 4800) --fit $folder/ladder | grep forecast"
    # shellcheck disable=SC2046
    titanlite plan benchmarks/scaling_debug.toml $(settings 64 4800) --fit $folder/ladder | grep '^forecast'
    train 64 4800 $folder/64-4800
    echo "this run, trained: $(grep -o 'validation loss [0-9.]*' $folder/64-4800.log | tail -1)"
} | tee $result.new
mv $result.new $result
