"""Arrays of any library: where they lie, their dtypes and layouts, files of them."""
