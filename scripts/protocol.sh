#!/usr/bin/env bash
# Run a verb of the protocol: protocol.sh VERB [OPTION]…   PYTHON names the interpreter (python3 by default).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m scripts.protocol "$@"
