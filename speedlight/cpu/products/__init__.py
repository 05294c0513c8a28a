"""The ways to multiply on a CPU: units, packing, and one step of a sum."""
