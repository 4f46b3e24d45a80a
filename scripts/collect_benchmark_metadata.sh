#!/usr/bin/env bash
# What a figure depends on: card, driver, clocks, software, environment, model.
exec "$(dirname "${BASH_SOURCE[0]}")/protocol.sh" metadata "$@"
