#!/usr/bin/env bash
# Everything that someone with a card can show: tests with evidence, sanitizer, tuning, benchmarks.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" card "$@"
