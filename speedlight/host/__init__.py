"""The process and the machine it runs in: vector units, LLVM, forks, rounding modes, lazy imports, tunings."""
