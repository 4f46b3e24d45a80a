#!/usr/bin/env bash
# Level 4: decode and prefill of stock vLLM and jitmx side by side.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level4 "$@"
