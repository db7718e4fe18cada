"""Sessions that outlive their notebook: real kernels that are killed, and others that attach."""
