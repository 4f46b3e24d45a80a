#!/usr/bin/env bash
# Float32 logits of transformers in a file, for level 2 on a machine that has no room for it.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" reference "$@"
