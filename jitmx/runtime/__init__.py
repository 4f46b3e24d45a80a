"""From machine code to a running kernel: the driver, loading, launching."""
