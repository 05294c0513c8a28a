"""Running kernels: compilation and its cache, threads, tunings in force, the measured roof."""
