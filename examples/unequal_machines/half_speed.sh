#!/usr/bin/env bash
# Runs a command with half of a core: a machine that is half as fast. usage: half_speed.sh COMMAND…
# By a CPU quota (cgroup v1, as root); where that can't be had, a busy process shares the command's core.
set -uo pipefail
group=/sys/fs/cgroup/cpu/bitwright-half-$$
if mkdir "$group" 2>/dev/null && echo 10000 >"$group/cpu.cfs_period_us" && echo 5000 >"$group/cpu.cfs_quota_us"; then
  (echo "$BASHPID" >"$group/cgroup.procs" && exec "$@")
  status=$?
  rmdir "$group"
  exit $status
fi
core=$(($(nproc) - 1))
taskset -c "$core" timeout "${HALF_SPEED_LIMIT:-3600}" bash -c 'while :; do :; done' &
busy=$!
trap 'kill $busy 2>/dev/null' EXIT
taskset -c "$core" "$@"
