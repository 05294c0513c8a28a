"""The kernels, written in the vector language, and the micro-kernels they are made of."""
