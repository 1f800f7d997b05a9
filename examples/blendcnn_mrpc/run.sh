#!/usr/bin/env bash
# BlendCNN from nothing to measured INT8 in three commands: train, tune, benchmark.
# usage: run.sh [descriptions|mrpc] [FOLDER]; EPOCHS, TRIALS and RUNS choose how long it trains, tunes and measures.
set -euo pipefail

task=${1:-descriptions}
out=${2:-runs/$task}
workload=$(dirname "$0")/workload.py:$task

case $task in
descriptions) rate=0.003 ;;
mrpc) rate=0.001 ;; # needs BITWRIGHT_DATA
*)
  echo "usage: run.sh [descriptions|mrpc] [FOLDER]" >&2
  exit 2
  ;;
esac
# AdamW on small batches; the best epoch on the held-out pairs is the result.
unset BLENDCNN_FLOAT
bitwright train "${workload}_choose" --optimizer adamw --lr $rate --weight-decay 0.01 --warmup 0.5 --clip 1 --batch 32 \
  --epochs "${EPOCHS:-5}" --patience 2 -o "$out/float"
export BLENDCNN_FLOAT=$out/float
bitwright tune "${workload}_choose" --drop 1% --minutes 10 --trials "${TRIALS:-20}" -o "$out/int8"
bitwright bench "$workload" --model "$out/int8" --batch 1 --batch 32 --runs "${RUNS:-50}" -o "$out/bench.json"
