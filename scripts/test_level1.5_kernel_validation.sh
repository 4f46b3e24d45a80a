#!/usr/bin/env bash
# Level 1.5: the kernels that ran are those of the configuration.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level1.5 "$@"
