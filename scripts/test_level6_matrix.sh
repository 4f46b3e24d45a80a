#!/usr/bin/env bash
# Level 6: every combination of layers, activation and tile.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level6 "$@"
