"""Python that writes vector code: values, functions, conversions, random numbers, table lookups."""
