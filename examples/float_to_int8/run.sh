#!/usr/bin/env bash
# From nothing to INT8 inference in three commands: train in bf16, train quantized, deploy and measure.
# usage: run.sh [digits|cifar10] [FOLDER]; FLOAT_EPOCHS and INT8_EPOCHS choose how long it trains.
set -euo pipefail

task=${1:-digits}
out=${2:-runs/$task}

case $task in
digits)
  workload=digits-untrained
  bitwright train $workload --amp bf16 --epochs "${FLOAT_EPOCHS:-6}" --lr 0.05 -o "$out/float"
  bitwright train $workload --init "$out/float" --precision int8 --epochs "${INT8_EPOCHS:-2}" --lr 0.005 -o "$out/int8"
  ;;
cifar10)
  # The float checkpoint is given: it comes with the workload. Needs BITWRIGHT_DATA.
  workload=resnet20-cifar10
  bitwright train $workload --precision int8 --epochs "${INT8_EPOCHS:-2}" --lr 0.0005 --freeze-bn 0 --distill 0.5 -o "$out/int8"
  ;;
*)
  echo "usage: run.sh [digits|cifar10] [FOLDER]" >&2
  exit 2
  ;;
esac
bitwright deploy $workload "$out/int8" -o "$out/deploy"
