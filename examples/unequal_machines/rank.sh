#!/usr/bin/env bash
# What torchrun starts: the first process is the fast machine, the others have half of a core.
here=$(cd "$(dirname "$0")" && pwd)
if [ "${LOCAL_RANK:-0}" = 0 ]; then exec "$@"; else exec "$here/half_speed.sh" "$@"; fi
