#!/usr/bin/env bash
# Three machines that change during a training, emulated on one: measure, train adaptively, slow one down, lose one.
# usage: machines.sh [WORKLOAD] [FOLDER]; EPOCHS, BATCH, ROUNDS, RATE, DELAY, CPUS and EVENTS choose how (see below).
#
# Each machine is a network namespace with an address of its own, a link with a rate (and a delay, where the kernel has
# netem), and a CPU quota (cgroup v1). This needs root. Without it, or with PLAIN=1, the same runs on 127.0.0.1 without
# limits.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
workload=${1:-$here/workload.py:resnet}
out=${2:-runs/machines}
read -r -a cpus <<<"${CPUS:-40 40 20}"      # percent of a core that each machine has
rate=${RATE:-200mbit} delay=${DELAY:-1ms}   # of each link
read -r -a events <<<"${EVENTS:-20 60 100}" # steps: slow down machine 0, restore it, kill machine 2 (it joins again)
export OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
python=${PYTHON:-python} name=bw$$ cpu=/sys/fs/cgroup/cpu
mkdir -p "$out"
out=$(cd "$out" && pwd)
pids=()

machines_up() { # a switch in a namespace of its own, and a cable to each machine
  [ -z "${PLAIN:-}" ] || return 1
  ip netns add "$name-switch" 2>/dev/null || return 1
  ip netns exec "$name-switch" ip link add switch type bridge || return 1
  ip netns exec "$name-switch" ip link set switch up
  for i in 0 1 2; do
    ip netns add "$name-$i"
    ip link add "net0" netns "$name-$i" type veth peer name "port$i" netns "$name-switch"
    ip netns exec "$name-switch" ip link set "port$i" master switch up
    ip netns exec "$name-$i" ip address add "10.77.0.$((i + 1))/24" dev net0
    ip netns exec "$name-$i" ip link set lo up
    ip netns exec "$name-$i" ip link set net0 up
    # the rate limits what a machine sends; the switch delays what it receives
    ip netns exec "$name-$i" tc qdisc add dev net0 root tbf rate "$rate" burst 64kb latency 400ms ||
      echo "machine $i: no rate limit here" >&2
    ip netns exec "$name-switch" tc qdisc add dev "port$i" root netem delay "$delay" 2>/dev/null ||
      echo "machine $i: no delay, because this kernel has no netem" >&2
    mkdir "$cpu/$name-$i" && echo 20000 >"$cpu/$name-$i/cpu.cfs_period_us" || return 1
    quota "$i" "${cpus[$i]}"
  done
}

machines_down() {
  set +e
  for pid in "${pids[@]}"; do kill -9 -- "-$pid" 2>/dev/null; done
  for i in 0 1 2; do
    [ -d "$cpu/$name-$i" ] || continue
    for _ in $(seq 50); do
      xargs -r kill -9 <"$cpu/$name-$i/cgroup.procs" 2>/dev/null
      rmdir "$cpu/$name-$i" 2>/dev/null && break
      sleep 0.1
    done
    ip netns del "$name-$i" 2>/dev/null
  done
  ip netns del "$name-switch" 2>/dev/null
  true
}
trap machines_down EXIT

quota() { # MACHINE PERCENT
  if $separate; then echo $(($2 * 200)) >"$cpu/$name-$1/cpu.cfs_quota_us"; fi
}

on() { # MACHINE COMMAND…: start it there, in a session of its own
  local i=$1
  shift
  if $separate; then
    GLOO_SOCKET_IFNAME=net0 setsid bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' - "$cpu/$name-$i" \
      ip netns exec "$name-$i" "$@" >>"$out/machine$i.log" 2>&1 &
  else
    GLOO_SOCKET_IFNAME=lo setsid "$@" >>"$out/machine$i.log" 2>&1 &
  fi
  pids[$i]=$!
}

torchrun_on() { # MACHINE NODES COMMAND…
  local i=$1 nodes=$2 address=127.0.0.1 host=0
  shift 2
  if $separate; then address=10.77.0.$((i + 1)); fi
  if [ "$i" = 0 ]; then host=1; fi
  local meeting=127.0.0.1
  if $separate; then meeting=10.77.0.1; fi
  on "$i" "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d --rdzv-id "$1$nodes" \
    --rdzv-endpoint "$meeting:${PORT:-29471}" --local-addr "$address" --monitor-interval 0.5 \
    --rdzv-conf "is_host=$host,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5,read_timeout=300" -m bitwright "$@"
}

finish() { # wait for the machines that run; all must succeed
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || { tail -n 30 "$out/machine$i.log" >&2; exit 1; }
    unset "pids[$i]"
  done
}

until_step() { # wait until the training has reached this step
  while kill -0 "${pids[0]}" 2>/dev/null; do
    local step
    step=$(tail -n 1 "$out/run/history.jsonl" 2>/dev/null | sed -n 's/.*"step": \([0-9]*\).*/\1/p') || step=0
    if [ "${step:-0}" -ge "$1" ]; then return 0; fi
    sleep 0.2
  done
  echo "the training ended before step $1" >&2
  return 1
}

separate=true
if ! machines_up; then
  machines_down
  separate=false
  echo "no namespaces or cgroups here: three processes on 127.0.0.1, without limits" >&2
fi

# 1. Measure the machines together: their operators, and collectives between them.
cat >"$out/cluster.yaml" <<'YAML'
bitwright_cluster: 1
devices:
  first: {profile: machine.json}
  second: {profile: machine.rank1.json}
  third: {profile: machine.rank2.json}
YAML
if [ ! -f "$out/machine.rank2.json" ]; then # a later call uses them again
  for i in 0 1 2; do
    torchrun_on "$i" 3 profile "$workload" --kernel int8 --batch "${BATCH:-32}" --half-batch \
      --no-casts --rounds "${ROUNDS:-5}" -o "$out/machine.json" --cache "$out/machine.jsonl"
  done
  finish
fi

# 2. Score the operators once.
[ -f "$out/scores.json" ] || "$python" -m bitwright score "$workload" --indicator gradient-variance --formats int8 -o "$out/scores.json"

# 3. Train. Each machine names its kind. The plan follows from the machines that are present.
kinds=(first second third)
train_on() {
  torchrun_on "$1" 2:3 train "$workload" --adaptive "$out/cluster.yaml" --scores "$out/scores.json" \
    --device-kind "${kinds[$1]}" --batch "${BATCH:-32}" --epochs "${EPOCHS:-4}" --lr 0.02 --save-steps 10 \
    --log-steps 1 --no-tensorboard -o "$out/run"
}
for i in 0 1 2; do train_on "$i"; done

# 4. The machines change.
if until_step "${events[0]}"; then
  quota 0 $((${cpus[0]} / 2))
  echo "machine 0 has half of its CPU"
fi
if until_step "${events[1]}"; then
  quota 0 "${cpus[0]}"
  echo "machine 0 has its CPU again"
fi
if until_step "${events[2]}"; then
  if $separate; then xargs -r kill -9 <"$cpu/$name-2/cgroup.procs" 2>/dev/null || true; fi
  pkill -9 -s "${pids[2]}" 2>/dev/null || true
  wait "${pids[2]}" 2>/dev/null || true
  unset "pids[2]"
  echo "machine 2 is dead"
  if until_step $((${events[2]} + 15)); then
    echo "machine 2 joins again"
    train_on 2
    late=${pids[2]}
    unset "pids[2]"
    finish
    if kill -0 "$late" 2>/dev/null; then # it may still wait for the others, if the training was short
      for _ in $(seq 100); do kill -0 "$late" 2>/dev/null || break; sleep 0.2; done
      if kill -9 -- "-$late" 2>/dev/null; then echo "machine 2 came too late: use more EPOCHS"; fi
    fi
  fi
fi
finish
sed -n 's/.*\(step [0-9]*: .*\)/\1/p' "$out/machine0.log" | sort -u | tail -n 20
echo "report: $out/run/report.html"
