#!/usr/bin/env bash
# One leg of the run of train_configs/qwen3_30m.toml, on a machine where commands may only take minutes:
#
#   [LIMIT_S=300] [NGPU=1] [RESULT=folder] bash benchmarks/qwen3_30m.sh [--section.key=value ...]
#
# Makes the text unless it is there, trains for at most LIMIT_S seconds, then stops the run with SIGTERM, which saves.
# The same command continues. Exit code 0: the run is done; 75: it is to be continued. The folder RESULT (by default
# outputs/qwen3_30m_result) gets what benchmarks/trained_run.py reads, and the report on the run so far.
set -eu -o pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} run=${RUN:-outputs/qwen3_30m} text=outputs/text_by_kind
result=${RESULT:-outputs/qwen3_30m_result}

[ -e $text/summary.json ] || "$python" benchmarks/text_by_kind.py --folder $text
leg=0
while [ -e "$run/leg$leg.log" ]; do leg=$((leg + 1)); done
mkdir -p "$run" "$result"
code=0
timeout --preserve-status -s TERM "${LIMIT_S:-300}" ./run_train.sh qwen3_30m "--job.dump_folder=$run" "$@" 2>&1 | tee "$run/leg$leg.log" ||
    code=${PIPESTATUS[0]}
echo "leg $leg ended with $code after $SECONDS s"
"$python" -m titanlite.cli report "$run" -o "$result/report.html" || true
cp $text/summary.json "$run/text.json"
tar -C "$run" --exclude=checkpoint --exclude=tb --exclude=LOCK -czf "$result/run.tar.gz" .
exit "$code"
