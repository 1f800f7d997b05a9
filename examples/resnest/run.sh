#!/usr/bin/env bash
# Tune and benchmark ResNeSt with LPOT's YAML on an image folder.
# usage: run.sh [--data FOLDER] [--config FILE] [--checkpoint FILE] [--full] [--output FOLDER]
# EPOCHS and RUNS choose how long it trains and measures; CORES and INSTANCES are LPOT's configs of the benchmark.
set -euo pipefail

here=$(dirname "$0")
data= config=$here/resnest.yaml checkpoint= model=narrow out=runs/resnest
while [ $# -gt 0 ]; do
  case $1 in
  --full) model=full && shift && continue ;;
  --data | --config | --checkpoint | --output) [ $# -gt 1 ] || { echo "usage: $1 needs a value" >&2 && exit 2; } ;;
  *) echo "usage: run.sh [--data FOLDER] [--config FILE] [--checkpoint FILE] [--full] [--output FOLDER]" >&2 && exit 2 ;;
  esac
  case $1 in
  --data) data=$2 ;;
  --config) config=$2 ;;
  --checkpoint) checkpoint=$2 ;;
  --output) out=$2 ;;
  esac
  shift 2
done

mkdir -p "$out"
if [ -z "$data" ]; then
  data=$out/images
  [ -d "$data" ] || python "$here/images.py" "$data"
fi
python "$here/folders.py" "$config" "$(cd "$data" && pwd)" >"$out/lpot.yaml"
export RESNEST_CONFIG=$out/lpot.yaml
unset RESNEST_CHECKPOINT
if [ -z "$checkpoint" ] && [ $model = narrow ]; then
  bitwright train "$here/workload.py:narrow" --optimizer adamw --lr 0.003 --weight-decay 0.01 --warmup 0.5 --batch 32 \
    --epochs "${EPOCHS:-20}" -o "$out/float"
  checkpoint=$out/float
fi
[ -z "$checkpoint" ] || export RESNEST_CHECKPOINT=$checkpoint
bitwright tune "$out/lpot.yaml" --workload "$here/workload.py:$model" -o "$out/int8"
bitwright bench "$here/workload.py:$model" --model "$out/int8" --batch 1 --runs "${RUNS:-100}" \
  ${CORES:+--cores "$CORES"} ${INSTANCES:+--instances "$INSTANCES"} -o "$out/bench.json"
