#!/usr/bin/env bash
# Level 5: a report of level 4 against a stored one.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level5 "$@"
