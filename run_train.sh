#!/usr/bin/env bash
# Train on this node's devices:
#
#   [NGPU=n] [LOG_RANK=0] ./run_train.sh <name in train_configs | path.toml> [--section.key=value ...]
#   CONFIG_FILE=path.toml ./run_train.sh [--section.key=value ...]
#
# For several nodes, run this script on each node with NNODES, NODE_RANK and RDZV_ENDPOINT=host:port (host: the first
# node). MAX_RESTARTS=k restarts all processes up to k times after a crash; NNODES=MIN:MAX continues with fewer nodes.
# Whoever can reach the ports that several nodes open controls the job: use a network that you trust, and the same
# random RDZV_ID on all nodes. A single node opens no port to the network.
# GRACE=seconds from a signal to stop until this node is killed; NOTICE=aws, azure, google, a URL or a file that
# announces the end of this node. EXCLUDE_SLOW=1: of several nodes, one with a slow rank leaves at the next restart.
# SIGTERM, SIGINT, SIGHUP, SIGUSR1: save, then exit with 75 (the same command continues). SIGUSR2: save and continue.
# Exit codes: 0 done, 1 crash, 2 wrong input, 3 no usable checkpoint, 4 training diverged, 5 out of memory,
# 6 a GPU computes wrong numbers, 75 stopped, nothing lost. Codes 2, 3, 4, 6 and 75 are never restarted; 5 is, because
# another process may have taken the memory, but without a change of the job it usually repeats.
set -eu

if [ -z "${CONFIG_FILE:-}" ]; then
    usage="usage: [NGPU=n] ./run_train.sh <name in train_configs | path.toml> [--section.key=value ...]
\`titanlite train --help\` lists the keys, and the first lines of $0 the variables"
    case ${1:-} in
        -h | --help) echo "$usage"; exit 0 ;;
        "" | --*) echo "$usage" >&2; exit 2 ;;
    esac
    CONFIG_FILE=$1
    shift
fi

NGPU=${NGPU:-1}
cores=$(getconf _NPROCESSORS_ONLN)
if [ "$NGPU" -gt 1 ] 2>/dev/null; then  # the launcher reports a value that is not a number
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
fi
export LOG_RANK=${LOG_RANK:-0}
exclude_slow=
[ "${EXCLUDE_SLOW:-0}" = 0 ] || exclude_slow=--exclude-slow

exec "${PYTHON:-python3}" -m titanlite.cli launch \
    --nproc-per-node="$NGPU" \
    --nnodes="${NNODES:-1}" \
    --node-rank="${NODE_RANK:-0}" \
    --rdzv-endpoint="${RDZV_ENDPOINT:-}" \
    --rdzv-id="${RDZV_ID:-}" \
    --max-restarts="${MAX_RESTARTS:-0}" \
    --grace="${GRACE:-}" \
    --notice="${NOTICE:-}" \
    $exclude_slow \
    "$CONFIG_FILE" "$@"
