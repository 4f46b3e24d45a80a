"""A PTX simulator: runs what NVRTC emits on NumPy, thread for thread, and checks every access on the way."""
