"""Scripts of the checkout; the protocol's modules are in `scripts.protocol`."""
