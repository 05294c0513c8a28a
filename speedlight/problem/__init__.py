"""Problems: the checked options and arrays of a call, with its tiles, work and plan."""
