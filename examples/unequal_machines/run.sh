#!/usr/bin/env bash
# One model on two machines, one half as fast as the other, both emulated here: measure, plan, predict, train.
# usage: run.sh [resnet|vgg|bert|roberta] [FOLDER]; EPOCHS, ROUNDS and PLANNER choose how long and how.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
model=${1:-vgg}
out=${2:-runs/$model}
workload=$here/workload.py:$model
export OMP_NUM_THREADS=1
mkdir -p "$out"
cat >"$out/cluster.yaml" <<'YAML'
bitwright_cluster: 1
link: {latency_us: 200, gbit_per_s: 10}
devices:
  fast: {profile: fast.json}
  slow: {profile: slow.json}
YAML

# encoders have no images to lay out
layout=$(case $model in resnet | vgg) echo --channels-last ;; esac)
measure="--kernel int8 --batch 32 --half-batch --rounds ${ROUNDS:-15} $layout"
bitwright profile "$workload" $measure -o "$out/fast.json" --cache "$out/fast.jsonl"
"$here/half_speed.sh" bitwright profile "$workload" $measure -o "$out/slow.json" --cache "$out/slow.jsonl"
bitwright score "$workload" --indicator gradient-variance --formats int8 -o "$out/scores.json"
bitwright plan-cluster "$workload" --cluster "$out/cluster.yaml" --scores "$out/scores.json" --batch 32 $layout \
  --planner "${PLANNER:-recover+split}" -o "$out/plan.yaml"
bitwright predict "$workload" --cluster "$out/cluster.yaml" --plan "$out/plan.yaml" --batch 32 $layout
torchrun --nproc-per-node 2 --no-python "$here/rank.sh" \
  bitwright train "$workload" --plan "$out/plan.yaml" --device-kind fast,slow --epochs "${EPOCHS:-4}" --lr 0.02 \
  $layout -o "$out/run"
