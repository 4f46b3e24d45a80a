#!/usr/bin/env bash
# Level 2: logits and greedy tokens beside two stock backends and transformers.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" level2 "$@"
