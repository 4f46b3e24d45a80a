"""Which variant serves a call, and why."""
