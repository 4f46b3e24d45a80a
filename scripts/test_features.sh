#!/usr/bin/env bash
# LoRA, prefix caching and chunked prefill: jitmx beside a stock backend, all of it on.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" features "$@"
