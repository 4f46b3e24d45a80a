#!/usr/bin/env bash
# Level 1: a server starts, answers one request, and ends when told to.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level1 "$@"
