#!/usr/bin/env bash
# Level 3: 100 requests in sequence, 4 at a time, 16k tokens of context.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level3 "$@"
